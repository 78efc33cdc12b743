// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/mustang-net/mustang/internal/state"
)

// Nodes is what a node knows of itself and of the others.
type Nodes struct {
	Settings *state.NodeSettings `json:"settings,omitempty"` // nil: it was told nothing
	Nodes    []state.Node        `json:"nodes"`
	Self     string              `json:"self,omitempty"`    // the name of the one that this node is, as an agent knows it
	PodMTU   int                 `json:"pod_mtu,omitempty"` // of pods' routes, where it is less than their interfaces'
	Tunnel   bool                `json:"tunnel,omitempty"`  // pods of another node are reached by one
	LastRef  uint32              `json:"last_ref"`          // the number that the last reference was told apart by
	// Telling is there until all pods have been told an MTU, when it becomes PodMTU, 0 till
	// then: those that their routes may have, and last the one that they are told.
	Telling []int `json:"telling,omitempty"`
}

// PodMTUs are those that pods' routes may have; the last is what pods are told.
func (n Nodes) PodMTUs() []int {
	if len(n.Telling) > 0 {
		return n.Telling
	}
	return []int{n.PodMTU}
}

// ToldMTU is what pods are told, and those to come with them.
func (n Nodes) ToldMTU() int {
	all := n.PodMTUs()
	return all[len(all)-1]
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

// NodesFile is the list's file, by which one can tell whether it is another now; nil: there is none.
func (s Store) NodesFile() (os.FileInfo, error) {
	info, err := os.Stat(filepath.Join(s.dir, nodesFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return info, err
}

// PutNodes replaces the list of nodes in one step.
func (s Store) PutNodes(n Nodes) error { return s.write(filepath.Join(s.dir, nodesFile), n) }
