// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"errors"
	"fmt"
	"os"

	"github.com/containernetworking/cni/pkg/types"
)

// Error codes of the CNI spec 1.1.0 that types does not name.
const (
	errUnavailable        uint = 50 // STATUS: ADD could not work
	errUnavailableLimited uint = 51 // STATUS: and what runs may suffer, too
)

// Codes of our own; the spec leaves 100 and above to plugins.
const (
	errNotAsExpected uint = 100 // CHECK: something is broken
	errExists        uint = 101 // ADD: the attachment or the interface is there already
	errExhausted     uint = 102 // ADD: no address is free
	errPortTaken     uint = 103 // ADD: a host port is taken
)

// coded is err as a runtime is told it: all that it says, with the code that something in
// it has, else with code.
func coded(code uint, err error) *types.Error {
	var e *types.Error
	if !errors.As(err, &e) {
		return types.NewError(code, err.Error(), "")
	}
	if err != error(e) {
		e = types.NewError(e.Code, err.Error(), "")
	}
	return e
}

func codedf(code uint, format string, args ...any) *types.Error {
	return types.NewError(code, fmt.Sprintf(format, args...), "")
}

// isLater says that an error is about now, and not about what was asked for.
func isLater(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && e.Code == types.ErrTryAgainLater
}

// invalid is a configuration that cannot work; field is what to change.
func invalid(field, format string, args ...any) *types.Error {
	return types.NewError(types.ErrInvalidNetworkConfig, field+": "+fmt.Sprintf(format, args...), "")
}

// toStderr writes a sentence to standard error, which runtimes log.
func toStderr(sentence string) { fmt.Fprintln(os.Stderr, "mustang-cni: "+sentence) }
