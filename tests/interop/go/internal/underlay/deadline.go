package underlay

import (
	"sync"
	"time"
)

// Deadline is a time that can be moved, and a channel that is closed when it has come.
type Deadline struct {
	mu    sync.Mutex
	timer *time.Timer
	done  chan struct{}
}

// NewDeadline returns one that never comes.
func NewDeadline() *Deadline { return &Deadline{done: make(chan struct{})} }

// Passed returns a channel that is closed once the deadline that holds now has come.
func (d *Deadline) Passed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.done
}

// Set moves the deadline; zero is never.
func (d *Deadline) Set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	select {
	case <-d.done:
		d.done = make(chan struct{})
	default:
	}
	if t.IsZero() {
		return
	}
	done := d.done
	if wait := time.Until(t); wait > 0 {
		d.timer = time.AfterFunc(wait, func() { d.pass(done) })
		return
	}
	close(done)
}

func (d *Deadline) pass(done chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-done:
	default:
		close(done)
	}
}
