// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
)

// digest stands for content: nobody finds two contents that have one.
type digest [sha256.Size]byte

func digestOf(parts ...string) digest { return sha256.Sum256([]byte(join(parts...))) }

// number is 64 bits of d: the number of its content, unless another has that already.
func (d digest) number() uint64 {
	n := binary.LittleEndian.Uint64(d[:])
	if n < first {
		n += first
	}
	return n
}

// hash is the number of content that is there before any other.
func hash(parts ...string) uint64 { return digestOf(parts...).number() }

// numbers are those of the contents of one kind. Who may label pods can search for labels
// whose 64 bits are another pod's, so whole digests are compared: of contents that collide,
// the one that comes later has the next free number.
type numbers struct {
	begin func(digest) uint64 // where the search for a number begins
	of    map[digest]uint64
	by    map[uint64]digest
	idle  map[digest]bool // nobody has that content any more
}

func newNumbers() numbers {
	return numbers{digest.number, map[digest]uint64{}, map[uint64]digest{}, map[digest]bool{}}
}

// number is d's, and stays its until it is released.
func (n *numbers) number(d digest) uint64 {
	if id, ok := n.of[d]; ok {
		delete(n.idle, d)
		return id
	}
	id := n.begin(d)
	for ; id < first || n.taken(id); id++ {
	}
	n.of[d], n.by[id] = id, d
	return id
}

func (n *numbers) taken(id uint64) bool {
	_, taken := n.by[id]
	return taken
}

// release says that nobody has d any more. Its number stays its until the next plan is made:
// in one change a number has one meaning.
func (n *numbers) release(d digest) { n.idle[d] = true }

// forget lets others have the numbers of what is gone.
func (n *numbers) forget() {
	for d := range n.idle {
		delete(n.by, n.of[d])
		delete(n.of, d)
	}
	clear(n.idle)
}

// join is reversible, so that different lists never make the same string.
func join(parts ...string) string {
	var b strings.Builder
	for _, p := range parts {
		n := len(p)
		b.Write([]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
		b.WriteString(p)
	}
	return b.String()
}
