// Command quic-go-streams makes the requests of an experiment over unmodified quic-go, so that paced can be compared
// with the transport that the thesis changed. It is a client, a server that echoes streams, and a relay that carries
// packets in streams:
//
//	quic-go-streams serve -listen ADDRESS
//	quic-go-streams relay -listen ADDRESS -target ADDRESS
//	quic-go-streams request -server ADDRESS [-tunnelled] -requests FILE -limit DURATION
//
// It checks no certificates and relays to one target for every client, so it belongs in namespaces of an experiment.
package main

import (
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

// run executes the command that the arguments name; serve and relay run until the process is killed.
func run(arguments []string) error {
	if len(arguments) == 0 {
		return errors.New("say serve, relay or request")
	}
	flags := flag.NewFlagSet(arguments[0], flag.ExitOnError)
	switch arguments[0] {
	case "serve":
		listen := flags.String("listen", "", "UDP `address` to serve on")
		if err := flags.Parse(arguments[1:]); err != nil {
			return err
		}
		return accept(*listen, echo)
	case "relay":
		listen := flags.String("listen", "", "UDP `address` to serve on")
		target := flags.String("target", "", "UDP `address` that all packets are for")
		if err := flags.Parse(arguments[1:]); err != nil {
			return err
		}
		return relay(*listen, *target)
	case "request":
		server := flags.String("server", "", "UDP `address` of the server, or of the relay")
		tunnelled := flags.Bool("tunnelled", false, "make each request over a connection of its own, in a stream to a relay")
		file := flags.String("requests", "", "`file` with the requests, as JSON")
		limit := flags.Duration("limit", time.Minute, "how long all of them may take")
		if err := flags.Parse(arguments[1:]); err != nil {
			return err
		}
		requests, err := readRequests(*file)
		if err != nil {
			return err
		}
		return request(*server, *tunnelled, requests, *limit)
	default:
		return fmt.Errorf("no command %q", arguments[0])
	}
}
