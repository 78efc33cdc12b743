// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/mustang-net/mustang/internal/state"
)

// Nodes is what a node knows of itself and of the others.
type Nodes struct {
	Settings *state.NodeSettings `json:"settings,omitempty"` // nil: it was told nothing
	Nodes    []state.Node        `json:"nodes"`
	PodMTU   int                 `json:"pod_mtu,omitempty"` // of pods' routes, where it is less than their interfaces'
	Tunnel   bool                `json:"tunnel,omitempty"`  // pods of another node are reached by one
	LastRef  uint32              `json:"last_ref"`          // the number that the last reference was told apart by
}

// Nodes reads the list of nodes; none is an empty one.
func (s Store) Nodes() (Nodes, error) {
	var n Nodes
	err := readJSON(filepath.Join(s.dir, nodesFile), &n)
	if errors.Is(err, fs.ErrNotExist) {
		return n, nil
	}
	return n, err
}

// PutNodes replaces the list of nodes in one step.
func (s Store) PutNodes(n Nodes) error { return s.write(filepath.Join(s.dir, nodesFile), n) }
