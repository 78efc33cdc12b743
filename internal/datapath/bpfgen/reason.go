// SPDX-License-Identifier: Apache-2.0

package bpfgen

// Reason says why packets were dropped.
type Reason struct {
	Number   uint32
	Name     string // short, for scripts
	Sentence string // for people
}

// Objects are the compiled objects, for telling builds apart.
func Objects() [][]byte {
	return [][]byte{_PodBytes, _SockBytes, _EntryBytes, _ParentBytes, _EdgeBytes}
}

// IterObject is the iterator over sockets, for telling builds of it apart.
func IterObject() []byte { return _IterBytes }
