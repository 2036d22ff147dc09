package main

import (
	"errors"
	"io"

	"github.com/quic-go/quic-go"
)

// chunkBytes is how many bytes an echo reads at once.
const chunkBytes = 16 * 1024

// echo sends a stream's bytes back, with the priority that its first byte requests. A stream that ends early is reset,
// and its client sees that.
func echo(stream *quic.Stream) {
	chunk := make([]byte, chunkBytes)
	begun := false
	for {
		count, err := stream.Read(chunk)
		if count > 0 {
			if !begun {
				apply(chunk[0], stream)
				begun = true
			}
			if _, err := stream.Write(chunk[:count]); err != nil {
				stream.CancelRead(0)
				return
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			stream.Close()
			return
		case err != nil:
			stream.CancelWrite(0)
			return
		}
	}
}
