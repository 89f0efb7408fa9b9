// A proxy of CONNECT-IP on connect-ip-go, for one client at a time: tests/perf/users compares the exit with it.
//
//	go build -o /tmp/connect-ip-go . && /tmp/connect-ip-go -listen 192.0.2.2:4434 -name gw.example.net -certificate cert.pem
//	    -key key.pem -device proxy0 -address 10.9.2.2/32 -route 10.9.2.1/32
//
// It makes the device, which gets its addresses from whoever starts it, and does nothing that its library does not ask for: a
// packet a system call at the device, no credentials.
package main

import (
	"flag"
	"log"
	"net/http"
	"net/netip"
	"os"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
	"golang.org/x/sys/unix"
)

const largestPacket = 1500

func device(name string) (*os.File, error) {
	descriptor, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(descriptor, unix.TUNSETIFF, request); err != nil {
		return nil, err
	}
	// Reads then wait in the runtime, not in a thread.
	if err := unix.SetNonblock(descriptor, true); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(descriptor), name), nil
}

func serve(writer http.ResponseWriter, request *http.Request, tun *os.File, template *uritemplate.Template, address, route netip.Prefix) error {
	parsed, err := connectip.ParseProxyRequest(request, template)
	if err != nil {
		writer.WriteHeader(http.StatusBadRequest)
		return err
	}
	connection, err := (&connectip.Proxy{}).Proxy(writer, parsed)
	if err != nil {
		return err
	}
	defer connection.Close()
	if err := connection.AssignAddresses([]netip.Prefix{address}); err != nil {
		return err
	}
	if err := connection.AdvertiseRoute([]connectip.IPRoute{{StartIP: route.Addr(), EndIP: route.Addr()}}); err != nil {
		return err
	}
	failed := make(chan error, 2)
	go func() {
		packet := make([]byte, largestPacket)
		for {
			read, err := tun.Read(packet)
			if err != nil {
				failed <- err
				return
			}
			answer, err := connection.WritePacket(packet[:read])
			if err != nil {
				failed <- err
				return
			}
			if answer != nil {
				_, _ = tun.Write(answer)
			}
		}
	}()
	go func() {
		packet := make([]byte, largestPacket)
		for {
			read, err := connection.ReadPacket(packet)
			if err != nil {
				failed <- err
				return
			}
			// A packet that the device does not take, since it is down, is lost.
			_, _ = tun.Write(packet[:read])
		}
	}()
	return <-failed
}

func main() {
	listen := flag.String("listen", "", "UDP address")
	name := flag.String("name", "", "the name in the template")
	certificate := flag.String("certificate", "", "file")
	key := flag.String("key", "", "file")
	tunName := flag.String("device", "", "the TUN device, which it makes")
	address := flag.String("address", "", "what the client is assigned")
	route := flag.String("route", "", "the address that it may reach")
	flag.Parse()
	tun, err := device(*tunName)
	if err != nil {
		log.Fatal(err)
	}
	template := uritemplate.MustNew("https://" + *name + "/ip")
	handler := http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
		log.Print(serve(writer, request, tun, template, netip.MustParsePrefix(*address), netip.MustParsePrefix(*route)))
	})
	server := http3.Server{
		Addr:            *listen,
		Handler:         handler,
		EnableDatagrams: true,
		QUICConfig:      &quic.Config{EnableDatagrams: true},
	}
	log.Fatal(server.ListenAndServeTLS(*certificate, *key))
}
