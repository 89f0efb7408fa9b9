// Culvert-go dials agents, listens for them, forwards local ports to their services, and measures.
//
//	culvert-go keygen FILE                       make a key, print its public half
//	culvert-go dial LINK SERVICE                 standard input and output over a TCP forward; -udp: a line is a datagram
//	culvert-go forward LINK PORT=SERVICE…        local UDP and TCP ports that lead to services of the agent
//	culvert-go listen ADDRESS NAME=UPSTREAM…     offer services to the peers of -peer
//	culvert-go bench LINK SERVICE                datagrams, or with -stream bytes, to an echo or to a sink
//
// LINK is what `culvert link` prints: culvert://host:port/<public key>. Every command takes -key FILE; see each one's -h.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"culvert.example/culvert"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "culvert-go:", err)
		os.Exit(1)
	}
}

const usage = "usage: culvert-go keygen|dial|forward|listen|bench … (-h after a command explains it)"

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	commands := map[string]func(context.Context, []string) error{
		"keygen": keygen, "dial": dial, "forward": forward, "listen": listen, "bench": bench,
	}
	command := commands[args[0]]
	if command == nil {
		return errors.New(usage)
	}
	if err := command(ctx, args[1:]); !errors.Is(err, flag.ErrHelp) {
		return err
	}
	return nil
}

// options are those of every command that connects.
type options struct {
	*flag.FlagSet
	key     *string
	local   *string
	lanes   *int
	updates *uint64
	verbose *bool
}

func newOptions(name, arguments string) options {
	set := flag.NewFlagSet(name, flag.ContinueOnError)
	set.Usage = func() {
		fmt.Fprintf(set.Output(), "usage: culvert-go %s [options] %s\n", name, arguments)
		set.PrintDefaults()
	}
	return options{
		FlagSet: set,
		key:     set.String("key", "identity.key", "private key `FILE`, PKCS#8 in PEM, as culvert keygen writes it"),
		local:   set.String("local", "", "`ADDRESS` to send from, host:port"),
		lanes:   set.Int("lanes", 0, "the most lanes; 0 is 8, -1 is standard mode"),
		updates: set.Uint64("key-update-after", 0, "packets of a lane between key updates; 0 is half of what a key may seal"),
		verbose: set.Bool("v", false, "log what happens to connections"),
	}
}

// parse reads the command line; at least so many arguments follow the options.
func (o options) parse(args []string, least int) error {
	if err := o.Parse(args); err != nil {
		return err
	}
	if o.NArg() < least {
		o.Usage()
		return errors.New("an argument is missing")
	}
	return nil
}

func (o options) config() (culvert.Config, error) {
	key, err := culvert.LoadKey(*o.key)
	c := culvert.Config{Key: key, Local: *o.local, Lanes: *o.lanes, KeyUpdateAfter: *o.updates}
	if *o.verbose {
		c.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return c, err
}

// connect dials the agent of the first argument.
func (o options) connect(ctx context.Context) (*culvert.Peer, error) {
	link, err := culvert.ParseLink(o.Arg(0))
	if err != nil {
		return nil, err
	}
	config, err := o.config()
	if err != nil {
		return nil, err
	}
	return culvert.Dial(ctx, link, config)
}

func keygen(_ context.Context, args []string) error {
	if len(args) != 1 {
		return errors.New("usage: culvert-go keygen FILE")
	}
	key, err := culvert.GenerateKey()
	if err == nil {
		err = culvert.SaveKey(args[0], key)
	}
	if err == nil {
		fmt.Println(culvert.PublicOf(key))
	}
	return err
}

func dial(ctx context.Context, args []string) error {
	o := newOptions("dial", "LINK SERVICE")
	udp := o.Bool("udp", false, "a UDP flow: each line is a datagram, and so is each answer")
	if err := o.parse(args, 2); err != nil {
		return err
	}
	p, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer p.Close()
	if *udp {
		return lines(ctx, p, o.Arg(1))
	}
	stream, err := p.OpenStream(ctx, o.Arg(1))
	if err != nil {
		return err
	}
	defer stream.Close()
	context.AfterFunc(ctx, stream.Reset)
	go func() {
		if _, err := io.Copy(stream, os.Stdin); err == nil {
			_ = stream.CloseWrite()
		}
	}()
	_, err = io.Copy(os.Stdout, stream)
	return err
}

// lines sends lines as datagrams, and prints answers until a second after the end of the input.
func lines(ctx context.Context, p *culvert.Peer, service string) error {
	flow, err := p.OpenFlow(service)
	if err != nil {
		return err
	}
	defer flow.Close()
	context.AfterFunc(ctx, func() { flow.Close() })
	go func() {
		input := bufio.NewScanner(os.Stdin)
		for input.Scan() {
			if _, err := flow.Write(input.Bytes()); err != nil {
				fmt.Fprintln(os.Stderr, "culvert-go:", err)
			}
		}
		_ = flow.SetReadDeadline(time.Now().Add(time.Second))
	}()
	buffer := make([]byte, 65536)
	for {
		n, err := flow.Read(buffer)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", buffer[:n])
	}
}

func forward(ctx context.Context, args []string) error {
	o := newOptions("forward", "LINK PORT=SERVICE…")
	host := o.String("host", "127.0.0.1", "local `ADDRESS` of the ports")
	if err := o.parse(args, 2); err != nil {
		return err
	}
	p, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer p.Close()
	for _, each := range o.Args()[1:] {
		port, service, ok := strings.Cut(each, "=")
		if !ok {
			return fmt.Errorf("%q is not PORT=SERVICE", each)
		}
		local, err := culvert.ForwardPorts(ctx, p, net.JoinHostPort(*host, port), service)
		if err != nil {
			return err
		}
		fmt.Println(local, "leads to", service)
	}
	<-ctx.Done()
	return nil
}

// repeated is an option that may be given more than once.
type repeated []string

func (r *repeated) String() string { return strings.Join(*r, ",") }

func (r *repeated) Set(value string) error {
	*r = append(*r, value)
	return nil
}

func listen(ctx context.Context, args []string) error {
	o := newOptions("listen", "ADDRESS NAME=UPSTREAM…")
	var peers repeated
	o.Var(&peers, "peer", "public `KEY` that is admitted; may be given more than once")
	pieces := o.Bool("fragment", false, "datagrams that fit into no packet travel in pieces")
	if err := o.parse(args, 1); err != nil {
		return err
	}
	config, err := o.config()
	if err != nil {
		return err
	}
	allowed := make(map[culvert.PublicKey]bool)
	for _, text := range peers {
		key, err := culvert.ParsePublicKey(text)
		if err != nil {
			return err
		}
		allowed[key] = true
	}
	config.Authorize = func(key culvert.PublicKey) bool { return allowed[key] }
	for _, each := range o.Args()[1:] {
		name, upstream, ok := strings.Cut(each, "=")
		if !ok {
			return fmt.Errorf("%q is not NAME=UPSTREAM", each)
		}
		config.Services = append(config.Services, culvert.Service{
			Name: name, Fragment: *pieces,
			UDP: culvert.Forward("udp", upstream), TCP: culvert.Forward("tcp", upstream),
		})
	}
	l, err := culvert.Listen(o.Arg(0), config)
	if err != nil {
		return err
	}
	fmt.Println(l.Link())
	<-ctx.Done()
	return l.Close()
}

func bench(ctx context.Context, args []string) error {
	o := newOptions("bench", "LINK SERVICE")
	seconds := o.Float64("seconds", 5, "how long")
	size := o.Int("size", 1150, "bytes of a datagram, or of a write")
	rate := o.Float64("rate", 0, "Mbit/s of datagrams; 0 is as fast as it goes")
	streams := o.Int("stream", 0, "measure so many TCP forwards instead of a UDP flow")
	if err := o.parse(args, 2); err != nil {
		return err
	}
	p, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(ctx, time.Duration(*seconds*float64(time.Second)))
	defer cancel()
	if *streams > 0 {
		return benchStreams(ctx, p, o.Arg(1), *streams, *size)
	}
	return benchFlow(ctx, p, o.Arg(1), *size, *rate)
}

// benchFlow sends datagrams, counts those that come back, and shows what became of the lanes' packets.
func benchFlow(ctx context.Context, p *culvert.Peer, service string, size int, rate float64) error {
	flow, err := p.OpenFlow(service)
	if err != nil {
		return err
	}
	var received, receivedBytes uint64
	var reader sync.WaitGroup
	reader.Go(func() {
		buffer := make([]byte, 65536)
		for {
			n, err := flow.Read(buffer)
			if err != nil {
				return
			}
			received++
			receivedBytes += uint64(n)
		}
	})
	began, sent := time.Now(), uint64(0)
	datagram := make([]byte, size)
	for ctx.Err() == nil {
		if rate > 0 {
			due := time.Duration(float64(sent) * float64(size) * 8 / rate * float64(time.Microsecond))
			if ahead := due - time.Since(began); ahead > time.Millisecond {
				time.Sleep(ahead)
			}
		}
		// A datagram between two connections is a lost datagram.
		if _, err := flow.Write(datagram); err == nil {
			sent++
		} else if !errors.Is(err, culvert.ErrNotConnected) {
			return err
		}
	}
	took := time.Since(began).Seconds()
	time.Sleep(200 * time.Millisecond)
	flow.Close()
	reader.Wait()
	mbit := func(bytes uint64) float64 { return float64(bytes) * 8 / took / 1e6 }
	fmt.Printf("sent     %10d datagrams  %8.1f Mbit/s\n", sent, mbit(sent*uint64(size)))
	fmt.Printf("received %10d datagrams  %8.1f Mbit/s\n", received, mbit(receivedBytes))
	stats := p.Stats()
	for _, l := range stats.Lanes {
		fmt.Printf("lane %d: sent %d acked %d lost %d, %d of them late, received %d, %d B packets, RTT %v, key updates %d and %d\n",
			l.Index, l.SentPackets, l.Acked, l.Lost, l.Late, l.ReceivedPackets, l.PacketSize, l.RTT, l.KeyUpdates, l.PeerKeyUpdates)
	}
	if dropped := stats.QueueFull + stats.TooLarge + stats.OverRate + stats.NotConnected; dropped > 0 {
		fmt.Printf("dropped here: queue full %d, too large %d, over the peer's rate %d, not connected %d\n",
			stats.QueueFull, stats.TooLarge, stats.OverRate, stats.NotConnected)
	}
	return nil
}

// benchStreams sends bytes on several forwards and counts those that come back.
func benchStreams(ctx context.Context, p *culvert.Peer, service string, count, size int) error {
	var all sync.WaitGroup
	sent, received := make([]uint64, count), make([]uint64, count)
	began := time.Now()
	for i := range count {
		stream, err := p.OpenStream(ctx, service)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, stream.Reset)
		all.Go(func() {
			buffer := make([]byte, max(size, 64<<10))
			for {
				n, err := stream.Write(buffer)
				sent[i] += uint64(n)
				if err != nil {
					return
				}
			}
		})
		all.Go(func() {
			buffer := make([]byte, 128<<10)
			for {
				n, err := stream.Read(buffer)
				received[i] += uint64(n)
				if err != nil {
					return
				}
			}
		})
	}
	all.Wait()
	took := time.Since(began).Seconds()
	var up, down uint64
	for i := range count {
		up, down = up+sent[i], down+received[i]
	}
	fmt.Printf("sent     %8.1f Mbit/s\nreceived %8.1f Mbit/s\n", float64(up)*8/took/1e6, float64(down)*8/took/1e6)
	return nil
}
