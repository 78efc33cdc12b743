// SPDX-License-Identifier: Apache-2.0

package datapath

// told is 65,536 bits, 64 a word: which numbers another table may have. One that
// has no bit never was there, so that the programs need not look.
type told struct{ *Table[uint32, uint64] }

// tell sets bits, which stay.
func (t told) tell(numbers []uint16) error {
	words := map[uint32]uint64{}
	for _, n := range numbers {
		words[uint32(n)/64] |= 1 << (n % 64)
	}
	for word, bits := range words {
		had, _, err := t.Get(word)
		if err != nil {
			return err
		}
		if had|bits == had {
			continue
		}
		if err := t.Put([]uint32{word}, []uint64{had | bits}); err != nil {
			return err
		}
	}
	return nil
}
