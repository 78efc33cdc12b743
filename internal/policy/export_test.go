// SPDX-License-Identifier: Apache-2.0

package policy

// Collide makes all contents that come from now on begin at one of two numbers, of which one
// is that of content that is there before any other.
func (m *Model) Collide() {
	for _, n := range []*numbers{&m.peerNumbers, &m.setNumbers, &m.groupNumbers, &m.listNumbers} {
		at := first
		switch n {
		case &m.peerNumbers:
			at = noGroup.number()
		case &m.setNumbers:
			at = unknownSet.number()
		}
		n.begin = func(d digest) uint64 { return at + uint64(d[0]&1) }
	}
}
