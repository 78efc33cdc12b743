// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// Model is the state that a node's tables follow from. It is not for
// concurrent use.
type Model struct{}

// New is an empty model for tables of these sizes.
func New(limits Limits) *Model { return &Model{} }

// Limits are the sizes of the tables.
type Limits struct{ Peers, Ports, Identities, Prefixes int }

// SetPolicy adds a policy, or replaces the one of its name.
func (m *Model) SetPolicy(Policy) {}

// DeletePolicy removes a policy; an absent one is success. So for the others.
func (m *Model) DeletePolicy(Key) {}

// SetNamespace gives a namespace its labels.
func (m *Model) SetNamespace(name string, labels map[string]string) {}

func (m *Model) DeleteNamespace(name string) {}

// SetPod adds a pod of any node, or replaces the one of its name.
func (m *Model) SetPod(Pod) {}

func (m *Model) DeletePod(Key) {}

// SetEndpoint says which interface of this node is which pod's.
func (m *Model) SetEndpoint(Endpoint) {}

func (m *Model) DeleteEndpoint(id uint32) {}

// SetNode gives the addresses of this node's own namespace.
func (m *Model) SetNode(addrs []netip.Addr) {}
