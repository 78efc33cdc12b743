// SPDX-License-Identifier: Apache-2.0

// Package kubeproxy is the real kube-proxy as a contestant: on a lab's node, beside an API
// server, in any of its modes and by either backend of iptables.
package kubeproxy

import (
	"strings"

	"github.com/mustang-net/mustang/bench/run"
	"github.com/mustang-net/mustang/test/kube"
)

// Kind is kube-proxy in one of its modes, by one backend.
type Kind string

// What the contestants are called.
const (
	Iptables       Kind = "kube-proxy-iptables" // by iptables-nft
	IptablesLegacy Kind = "kube-proxy-iptables-legacy"
	Nftables       Kind = "kube-proxy-nftables"
)

// Kinds are all of them.
var Kinds = []Kind{Iptables, IptablesLegacy, Nftables}

// Mode is the one in kube-proxy's configuration.
func (k Kind) Mode() string {
	if k == Nftables {
		return "nftables"
	}
	return "iptables"
}

// backend is the program that loads the rules.
func (k Kind) backend() string {
	return map[Kind]string{Iptables: "iptables-nft", IptablesLegacy: "iptables-legacy", Nftables: "nft"}[k]
}

// Backend says what serves, with its version.
func (k Kind) Backend() string {
	return "kube-proxy " + kube.Version + ", " + run.BackendVersion(k.backend())
}

// Scanned says whether its Services are rules that are compared one by one.
func (k Kind) Scanned() bool { return k.Mode() == "iptables" }

// tool is iptables or ip6tables of the backend; with an action, the program that saves or
// restores.
func (k Kind) tool(v6 bool, action string) string {
	name := k.backend()
	if v6 {
		name = "ip6" + strings.TrimPrefix(name, "ip")
	}
	if action != "" {
		name += "-" + action
	}
	return name
}
