// SPDX-License-Identifier: Apache-2.0

package bpfgen

// Reason says why packets were dropped.
type Reason struct {
	Number   uint32
	Name     string // short, for scripts
	Sentence string // for people: why
	Mend     string // for people: what to do about it
}

// IterObject is the iterator over sockets, for telling builds of it apart.
func IterObject() []byte { return _IterBytes }
