package main

import (
	"errors"
	"testing"
)

func TestTargetsAreTakenOutOfThePath(t *testing.T) {
	for path, want := range map[string]string{
		"192.0.2.6/443/":        "192.0.2.6:443",
		"2001%3Adb8%3A%3A6/53/": "[2001:db8::6]:53",
		"target.example/65535/": "target.example:65535",
	} {
		got, err := parseTarget(pathPrefix + path)
		if err != nil || got != want {
			t.Errorf("%s: got %q, %v; want %q", path, got, err, want)
		}
	}
}

func TestPathsWithoutATargetAreRefused(t *testing.T) {
	for path, want := range map[string]targetError{
		"/elsewhere":                      notTemplate,
		pathPrefix + "host/1":             notTemplate,
		pathPrefix + "host/1/more/":       notTemplate,
		pathPrefix + "/1/":                badVariable,
		pathPrefix + "host/0/":            badVariable,
		pathPrefix + "host/65536/":        badVariable,
		pathPrefix + "host/http/":         badVariable,
		pathPrefix + "fe80%3A%3A1%25e/1/": badVariable,
	} {
		if _, err := parseTarget(path); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", path, err, want)
		}
	}
}
