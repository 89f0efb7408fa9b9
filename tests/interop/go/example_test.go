package culvert_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"culvert.example/culvert"
)

// A client of a UDP service behind an agent.
func Example() {
	key, err := culvert.LoadKey("identity.key")
	if err != nil {
		log.Fatal(err)
	}
	link, err := culvert.ParseLink("culvert://exit.example.net:4433/bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA")
	if err != nil {
		log.Fatal(err)
	}
	peer, err := culvert.Dial(context.Background(), link, culvert.Config{Key: key})
	if err != nil {
		log.Fatal(err)
	}
	defer peer.Close()
	flow, err := peer.OpenFlow("echo")
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Close()
	// A datagram may be lost: its sender repeats it.
	answer := make([]byte, 1500)
	for range 5 {
		if _, err := flow.Write([]byte("hello")); err != nil {
			log.Fatal(err)
		}
		_ = flow.SetReadDeadline(time.Now().Add(time.Second))
		if n, err := flow.Read(answer); err == nil {
			fmt.Printf("%s\n", answer[:n])
			return
		}
	}
}

// A listener offers a web server to one peer.
func ExampleListen() {
	key, err := culvert.LoadKey("identity.key")
	if err != nil {
		log.Fatal(err)
	}
	branch, err := culvert.ParsePublicKey("bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA")
	if err != nil {
		log.Fatal(err)
	}
	listener, err := culvert.Listen("0.0.0.0:4433", culvert.Config{
		Key:       key,
		Authorize: func(k culvert.PublicKey) bool { return k == branch },
		Services:  []culvert.Service{{Name: "web", TCP: culvert.Forward("tcp", "127.0.0.1:80")}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer listener.Close()
	peer, err := listener.Accept(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(peer.Key(), "is connected, and offers", peer.Services())
}
