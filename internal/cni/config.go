// SPDX-License-Identifier: Apache-2.0

package cni

// The plugin's configuration. docs/cni.schema.json describes the same fields;
// a test compares the two.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/ipam"
	"github.com/mustang-net/mustang/internal/link"
	"github.com/mustang-net/mustang/internal/state"
)

// Chained is the mode that attaches to what another plugin made.
const Chained = "chained"

// OwnIPAM is the ipam type of mustang's own pools.
const OwnIPAM = "mustang"

// Config is one plugin object of a network's list, as the runtime hands it over.
type Config struct {
	CNIVersion   string          `json:"cniVersion"`
	Name         string          `json:"name"`
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"` // for the runtime, not for us
	DNS          types.DNS       `json:"dns"`
	IPAM         IPAM            `json:"ipam"`

	Mode              string   `json:"mode"`              // how the pod is connected; veth
	MTU               MTU      `json:"mtu"`               // bytes, or "auto": the uplink's
	LocalMTU          LocalMTU `json:"localMTU"`          // towards the node's own pods: bytes, "auto" or "off"
	LocalCIDRs        []string `json:"localCIDRs"`        // where those are; mustang's own pools
	BigTCP            int      `json:"bigTCP"`            // bytes of the largest bundle of segments; 0: the kernel's 65536
	Uplink            string   `json:"uplink"`            // the node's interface to the network; that of its default route
	Bridge            string   `json:"bridge"`            // mode bridge: its name
	Masquerade        bool     `json:"masquerade"`        // towards the outside, pods wear the node's address
	MasqueradeExclude []string `json:"masqueradeExclude"` // destinations that count as inside
	ServicePath       string   `json:"servicePath"`       // where Services act: both, socket, tc or none
	RequireAgent      bool     `json:"requireAgent"`      // no pod starts without an agent, which knows its policy
	BPFFS             string   `json:"bpffs"`             // the node's scope, as the tool's flags
	StateDir          string   `json:"stateDir"`
	CgroupRoot        string   `json:"cgroupRoot"`

	Args          Args            `json:"args"`
	RuntimeConfig RuntimeConfig   `json:"runtimeConfig"`
	PrevResult    json.RawMessage `json:"prevResult"`
	// Valid is nil when the key is absent: then nothing may be collected.
	Valid *[]Attachment `json:"cni.dev/valid-attachments"`

	unread  error // of args or runtimeConfig, which nobody needs who takes a pod away
	exclude []netip.Prefix
	local   []netip.Prefix // LocalCIDRs, defaults filled in
	raw     []byte
}

// IPAM is who gives out addresses. Everything but type belongs to that plugin;
// pools are mustang's own.
type IPAM struct {
	Type   string        `json:"type"`
	Pools  []ipam.Pool   `json:"pools"`
	Routes []types.Route `json:"routes"`
	// DaemonSocket is the dhcp plugin's, who needs its daemon.
	DaemonSocket string `json:"daemonSocketPath"`
}

// unknown are the fields of its object that mustang's own pools do not have; another plugin's
// are that one's.
func (i IPAM) unknown(text []byte) []string {
	var given map[string]json.RawMessage
	if i.Type != OwnIPAM || json.Unmarshal(text, &given) != nil {
		return nil
	}
	maps.DeleteFunc(given, func(name string, _ json.RawMessage) bool {
		return slices.Contains([]string{"type", "pools", "routes"}, name)
	})
	return slices.Sorted(maps.Keys(given))
}

// leases says whether addresses come from the pod's network, so that the
// interface must be there before them, and while they are given back.
func leases(ipamType string) bool { return ipamType == "dhcp" }

// Args are arguments by the older convention (CONVENTIONS.md, "args").
type Args struct {
	CNI struct {
		IPs    []string `json:"ips"`
		MAC    string   `json:"mac"`
		Labels Labels   `json:"labels"`
	} `json:"cni"`
}

// Labels are a pod's, by key.
type Labels map[string]string

// UnmarshalJSON takes the convention's list of keys and values, or an object.
func (l *Labels) UnmarshalJSON(text []byte) error {
	if !bytes.HasPrefix(text, []byte("[")) {
		return json.Unmarshal(text, (*map[string]string)(l))
	}
	var list []struct{ Key, Value string }
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	*l = make(Labels, len(list))
	for _, x := range list {
		(*l)[x.Key] = x.Value
	}
	return nil
}

// RuntimeConfig are the capability arguments.
type RuntimeConfig struct {
	IPs          []string        `json:"ips"`
	MAC          string          `json:"mac"`
	PortMappings []PortMapping   `json:"portMappings"`
	Bandwidth    json.RawMessage `json:"bandwidth"` // for the bandwidth plugin behind us, whose qdisc needs room
	DNS          *types.DNS      `json:"dns"`
}

// Attachment names one interface of one container.
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// MTU is bytes; 0 is "auto".
type MTU int

// UnmarshalJSON takes a number or "auto".
func (m *MTU) UnmarshalJSON(text []byte) error {
	if string(text) == `"auto"` {
		*m = 0
		return nil
	}
	return json.Unmarshal(text, (*int)(m))
}

// LocalMTU is bytes; 0 is "auto", and localOff "off".
type LocalMTU int

const localOff LocalMTU = -1

// UnmarshalJSON takes a number, "auto" or "off".
func (m *LocalMTU) UnmarshalJSON(text []byte) error {
	switch string(text) {
	case `"auto"`:
		*m = 0
		return nil
	case `"off"`:
		*m = localOff
		return nil
	}
	return json.Unmarshal(text, (*int)(m))
}

// fields are where each field of a configuration goes; those of nil, which CNI's
// older conventions allow in any configuration, go nowhere. One at a time they
// are read in a third of the time that the whole struct takes: encoding/json
// learns the shape of all that a struct can hold, at every start.
func (c *Config) fields() map[string]any {
	return map[string]any{
		"cniVersion": &c.CNIVersion, "name": &c.Name, "type": &c.Type, "capabilities": &c.Capabilities, "dns": &c.DNS, "ipam": &c.IPAM,
		"mode": &c.Mode, "mtu": &c.MTU, "localMTU": &c.LocalMTU, "localCIDRs": &c.LocalCIDRs, "bigTCP": &c.BigTCP, "uplink": &c.Uplink, "bridge": &c.Bridge,
		"masquerade": &c.Masquerade, "masqueradeExclude": &c.MasqueradeExclude, "servicePath": &c.ServicePath, "requireAgent": &c.RequireAgent,
		"bpffs": &c.BPFFS, "stateDir": &c.StateDir, "cgroupRoot": &c.CgroupRoot,
		"args": &c.Args, "runtimeConfig": &c.RuntimeConfig, "prevResult": &c.PrevResult,
		"cni.dev/valid-attachments": &c.Valid, "cni.dev/attachments": nil,
	}
}

// Parse reads a configuration and refuses what cannot work. Unknown fields, also of ipam
// and its pools, go to unknown, one call each.
func Parse(text []byte, unknown func(field string)) (*Config, error) {
	c := &Config{raw: text}
	if unknown == nil {
		unknown = func(string) {}
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil {
		return nil, codedf(types.ErrDecodingFailure, "read the network configuration: %v", err)
	}
	known := c.fields()
	for _, name := range slices.Sorted(maps.Keys(given)) {
		place, ok := known[name]
		if !ok {
			unknown(name)
		}
		if place == nil {
			continue
		}
		err := json.Unmarshal(given[name], place)
		if err == nil {
			continue
		}
		err = codedf(types.ErrDecodingFailure, "read the network configuration: %s: %v", name, err)
		if name != "args" && name != "runtimeConfig" {
			return nil, err
		}
		c.unread = err
	}
	for _, name := range c.IPAM.unknown(given["ipam"]) {
		unknown("ipam." + name)
	}
	for i, p := range c.IPAM.Pools {
		for _, name := range p.Unknown() {
			unknown(fmt.Sprintf("ipam.pools[%d].%s", i, name))
		}
	}
	// libcni writes null for no attachment at all.
	if _, said := given["cni.dev/valid-attachments"]; said && c.Valid == nil {
		c.Valid = new([]Attachment)
	}
	if c.Mode == "" {
		c.Mode = link.Veth
	}
	if c.Uplink == "auto" {
		c.Uplink = ""
	}
	if c.ServicePath == "" {
		c.ServicePath = string(state.PathBoth)
	}
	if c.StateDir == "" {
		c.StateDir = engine.DefaultStateDir
	}
	if c.BPFFS == "" {
		c.BPFFS = engine.DefaultBPFFS
	}
	if c.RuntimeConfig.DNS != nil {
		c.DNS = *c.RuntimeConfig.DNS
	}
	return c, nil
}

// hasPrevResult says whether another plugin came before.
func (c *Config) hasPrevResult() bool {
	return len(c.PrevResult) > 0 && string(c.PrevResult) != "null"
}

// Validate refuses fields that contradict each other, each by its name. It
// looks at nothing but the configuration.
func (c *Config) Validate() error {
	if c.unread != nil {
		return c.unread
	}
	if !slices.Contains([]string{"both", "socket", "tc", "none"}, c.ServicePath) {
		return invalid("servicePath", "%q is unknown: use both, socket, tc or none", c.ServicePath)
	}
	if err := errors.Join(c.validateMasquerade(), c.validatePorts()); err != nil {
		return err
	}
	if c.Mode == Chained {
		return c.validateChained()
	}
	if err := link.KnownMode(c.Mode); err != nil {
		return invalid("mode", "%v, or chained", err)
	}
	if c.Bridge != "" && c.Mode != link.Bridge {
		return invalid("bridge", "%q has no meaning in mode %s: drop it, or use mode bridge", c.Bridge, c.Mode)
	}
	if err := (link.Spec{Mode: c.Mode, BigTCP: c.BigTCP}).ValidateBigTCP(); err != nil {
		return invalid("bigTCP", "%v", err)
	}
	if err := c.validateIPAM(); err != nil {
		return err
	}
	v6 := slices.ContainsFunc(c.IPAM.Pools, func(p ipam.Pool) bool { return p.Subnet.Addr().Is6() })
	if err := link.ValidateMTU(int(c.MTU), v6); err != nil {
		return invalid("mtu", "%v", err)
	}
	return c.validateLocal()
}

// validateLocal fills in where the node's own pods are: in its own pools, as far
// as those are whole networks. A part of one says that others have the rest.
func (c *Config) validateLocal() error {
	switch {
	case c.LocalMTU < localOff:
		return invalid("localMTU", "%d is no length: use \"auto\", \"off\" or a number of bytes", c.LocalMTU)
	case c.LocalMTU > 0 && !link.CanLocalMTU(c.Mode):
		return invalid("localMTU", "%d cannot be in mode %s, where no packet is longer than the uplink's MTU: drop it", c.LocalMTU, c.Mode)
	case c.LocalMTU == localOff && len(c.LocalCIDRs) > 0:
		return invalid("localCIDRs", "have no meaning when localMTU is \"off\": drop one of the two")
	}
	c.local = nil
	for _, text := range c.LocalCIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Bits() == 0 || p.Addr().Is4In6() {
			return invalid("localCIDRs", "%q is not a network: write one such as 10.1.0.0/24", text)
		}
		c.local = append(c.local, p.Masked())
	}
	if len(c.LocalCIDRs) == 0 {
		for _, p := range c.IPAM.Pools {
			if p.Whole() {
				c.local = append(c.local, p.Subnet)
			}
		}
	}
	if c.LocalMTU > 0 && len(c.local) == 0 {
		return invalid("localMTU", "%d needs to know where this node's pods are: name their networks in localCIDRs", c.LocalMTU)
	}
	return nil
}

// applyLocalMTU gives s its local MTU, where there is to be one.
func (c *Config) applyLocalMTU(s *link.Spec) {
	if c.LocalMTU == localOff || !link.CanLocalMTU(c.Mode) || len(c.local) == 0 || c.LocalMTU == 0 && s.MTU >= link.MaxLocalMTU {
		return
	}
	s.LocalCIDRs, s.LocalMTU = c.local, int(c.LocalMTU)
	if s.LocalMTU == 0 {
		s.LocalMTU = link.MaxLocalMTU
	}
}

func (c *Config) validateChained() error {
	for field, set := range map[string]bool{
		"ipam": c.IPAM.Type != "", "mtu": c.MTU != 0, "localMTU": c.LocalMTU != 0, "localCIDRs": len(c.LocalCIDRs) > 0, "bigTCP": c.BigTCP != 0, "uplink": c.Uplink != "", "bridge": c.Bridge != "",
	} {
		if set {
			return invalid(field, "has no meaning in mode chained, where another plugin makes the interface: drop it, or use another mode")
		}
	}
	return nil
}

func (c *Config) validateIPAM() error {
	switch c.IPAM.Type {
	case "":
		return invalid("ipam", "type is missing: use %q with pools, or name an IPAM plugin such as host-local", OwnIPAM)
	case OwnIPAM:
		if err := ipam.Normalize(c.IPAM.Pools); err != nil {
			return invalid("ipam.pools", "%v", err)
		}
	default:
		if len(c.IPAM.Pools) > 0 {
			return invalid("ipam.pools", "belong to type %q, not to %q: drop one of the two", OwnIPAM, c.IPAM.Type)
		}
		if strings.ContainsAny(c.IPAM.Type, "/\\") {
			return invalid("ipam", "type %q is a path: use the plugin's name", c.IPAM.Type)
		}
		if leases(c.IPAM.Type) && !link.CanLease(c.Mode) {
			return invalid("ipam", "type %q asks the pod's network for an address, which pods in mode %s cannot: use mode macvlan, bridge or host-device, or another ipam", c.IPAM.Type, c.Mode)
		}
	}
	return nil
}

func (c *Config) validateMasquerade() error {
	if len(c.MasqueradeExclude) > 0 && !c.Masquerade {
		return invalid("masqueradeExclude", "has no meaning without masquerade: drop it, or set masquerade to true")
	}
	c.exclude = nil
	for _, text := range c.MasqueradeExclude {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Addr().Is4In6() {
			return invalid("masqueradeExclude", "%q is not a network: write one such as 10.0.0.0/8", text)
		}
		c.exclude = append(c.exclude, p.Masked())
	}
	return nil
}

// scope is the node's, for the engine.
func (c *Config) scope() engine.Scope {
	return engine.Scope{BPFFS: c.BPFFS, StateDir: c.StateDir, CgroupRoot: c.CgroupRoot}
}

// wantedIPs are the addresses that the runtime asks for: by capability, by
// args, or by CNI_ARGS. Prefix lengths are not needed.
func (c *Config) wantedIPs(args map[string]string) (out []netip.Addr, err error) {
	list := c.RuntimeConfig.IPs
	if len(list) == 0 {
		list = c.Args.CNI.IPs
	}
	if len(list) == 0 && args["IP"] != "" {
		list = strings.Split(args["IP"], ",")
	}
	for _, text := range list {
		host, _, _ := strings.Cut(text, "/")
		a, err := netip.ParseAddr(host)
		if err != nil {
			return nil, invalid("runtimeConfig.ips", "%q is not an address", text)
		}
		for _, b := range out {
			if a.Is4() == b.Is4() {
				return nil, invalid("runtimeConfig.ips", "%s and %s are of one family: give at most one of each", b, a)
			}
		}
		out = append(out, a)
	}
	return out, nil
}

// wantedMAC is nil when the runtime leaves the choice to us.
func (c *Config) wantedMAC(args map[string]string) (net.HardwareAddr, error) {
	for _, given := range [][2]string{{"runtimeConfig.mac", c.RuntimeConfig.MAC}, {"args.cni.mac", c.Args.CNI.MAC}, {"CNI_ARGS MAC", args["MAC"]}} {
		field, text := given[0], given[1]
		if text == "" {
			continue
		}
		mac, err := net.ParseMAC(text)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 {
			return nil, invalid(field, "%q is not a unicast Ethernet address", text)
		}
		if c.Mode == Chained {
			return nil, invalid(field, "the interface is another plugin's in mode chained: let the tuning plugin change its address, before mustang in the list")
		}
		return mac, nil
	}
	return nil, nil
}

// cniArgs reads CNI_ARGS: pairs KEY=VALUE with semicolons between.
func cniArgs(text string) map[string]string {
	out := make(map[string]string)
	for _, pair := range strings.Split(text, ";") {
		if key, value, ok := strings.Cut(pair, "="); ok {
			out[key] = value
		}
	}
	return out
}
