package lane

const (
	// windowRing is how many numbers, from the highest down, are remembered.
	windowRing = 16384
)

// Window remembers which packet numbers were opened.
type Window struct {
	bits [windowRing / 64]uint64
	next uint64 // the highest number so far, plus one
}

// Next is the number after the highest one.
func (w *Window) Next() uint64 { return w.next }

// Fresh says whether a number is neither seen nor too old.
func (w *Window) Fresh(number uint64) bool {
	if number >= w.next {
		return true
	}
	if w.next-number > windowRing {
		return false
	}
	return w.bits[number%windowRing/64]>>(number%64)&1 == 0
}

// Add marks a fresh number as seen, and says whether it is the highest.
func (w *Window) Add(number uint64) bool {
	newest := number >= w.next
	if newest {
		if number-w.next >= windowRing {
			clear(w.bits[:])
		} else {
			for between := w.next; between < number; between++ {
				w.bits[between%windowRing/64] &^= 1 << (between % 64)
			}
		}
		w.next = number + 1
	}
	w.bits[number%windowRing/64] |= 1 << (number % 64)
	return newest
}
