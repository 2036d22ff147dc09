package main

import (
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// pathPrefix is the fixed part of the default template (RFC 9298 §2); {target_host}/{target_port}/ follows.
const pathPrefix = "/.well-known/masque/udp/"

// targetError is why a path names no target.
type targetError int

const (
	// notTemplate means that the path is no expansion of the template.
	notTemplate targetError = iota + 1
	// badVariable means that a variable of the template has a value that cannot be a host or a port.
	badVariable
)

// status returns the HTTP status for such a path.
func (e targetError) status() int {
	if e == notTemplate {
		return http.StatusNotFound
	}
	return http.StatusBadRequest
}

// Error implements error.
func (e targetError) Error() string {
	if e == notTemplate {
		return "the path does not match the template"
	}
	return "the target host or port is malformed"
}

// parseTarget extracts the target from an escaped path and returns it as host:port.
func parseTarget(escapedPath string) (string, error) {
	rest, ok := strings.CutPrefix(escapedPath, pathPrefix)
	if !ok {
		return "", notTemplate
	}
	variables := strings.Split(rest, "/")
	if len(variables) != 3 || variables[2] != "" {
		return "", notTemplate
	}
	host, err := url.PathUnescape(variables[0])
	// A zone ID has no meaning to another host (RFC 9298 §2).
	if err != nil || host == "" || strings.ContainsAny(host, "%/ ") {
		return "", badVariable
	}
	port, err := strconv.ParseUint(variables[1], 10, 16)
	if err != nil || port == 0 {
		return "", badVariable
	}
	return net.JoinHostPort(host, strconv.FormatUint(port, 10)), nil
}
