// SPDX-License-Identifier: Apache-2.0

// Package report holds what a bench run found: the JSON document with every
// raw round, the figures recomputed from it, and the tables for people.
//
// Figures are always computed from the raw samples in the document, so anyone
// with the file and this package gets the same ones.
package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/mustang-net/mustang/bench/runner"
)

// Schema names the document's layout; docs/bench-schema.json describes it. A
// field may be added under the same name; nothing changes its meaning.
const Schema = "mustang.bench/v1"

// schemaBefore is what the layout was called when all runs were of one host.
const schemaBefore = "mustang.bench.samehost/v1"

// Ways to reach the server.
const (
	PodIP     = "pod-ip"
	ClusterIP = "clusterip"
	Loopback  = "loopback"
)

// Modes beyond the lab's: bridge means with bridge-nf-call-iptables=1.
const (
	Veth        = "veth"
	Bridge      = "bridge"
	BridgeNFOff = "bridge-nf-off"
	Macvlan     = "macvlan"
	// PolicyRouting is veth with a routing rule for each pod.
	PolicyRouting = "policy-routing"
)

// Ways to tune pods; a plus sign joins several.
const (
	LocalMTU = "local-mtu"
	BigTCP   = "big-tcp"
)

// Places of the Service under test among rules that are scanned one by one.
const (
	Middle = "middle" // the mean of all
	Last   = "last"
)

// Subjects that are always there.
const (
	Base      = "loopback"          // what everything is divided by
	BaseAgain = Base + " again"     // the A/A control
	BaseMTU   = "loopback mtu 1500" // streams at the pods' MTU
)

// Document is one run.
type Document struct {
	Schema   string            `json:"schema"`
	Started  time.Time         `json:"started"`
	Finished time.Time         `json:"finished"`
	Complete bool              `json:"complete"` // false: interrupted; Samples has the finished rounds
	Settings Settings          `json:"settings"`
	Machine  Machine           `json:"machine"`
	Subjects []Subject         `json:"subjects"`
	Samples  []runner.Sample   `json:"samples"`
	Figures  []Figure          `json:"figures"`
	Bars     []Bar             `json:"bars"`
	Control  []Figure          `json:"control"`            // the A/A control; each must enclose 1
	Claims   []Claim           `json:"claims,omitempty"`   // of an article, judged by this run
	Profiles []Profile         `json:"profiles,omitempty"` // where the CPU time goes
	Failures map[string]string `json:"failures,omitempty"`
	Facts    map[string]bool   `json:"facts,omitempty"` // what happens, beside how fast
}

// Settings are what the run was asked for.
type Settings struct {
	Article    string   `json:"article,omitempty"` // whose table this is; "" for none
	Command    string   `json:"command,omitempty"` // of mustang bench; "" is samehost
	Quick      bool     `json:"quick,omitempty"`   // fewer contestants or shorter samples than the article's whole run
	Only       []string `json:"only,omitempty"`    // of an article's contestants those with one of these in their names; none for all
	Base       string   `json:"base,omitempty"`    // the subject that everything is divided by; "" is loopback
	Modes      []string `json:"modes"`
	ServicesBy []string `json:"services_by"`
	Services   []int    `json:"services"`
	Rounds     int      `json:"rounds"` // 0: as many as fit into a budget
	Duration   float64  `json:"duration_seconds"`
	Turns      int      `json:"turns"`               // of a sample; streams by iperf3 have one
	Calibrate  int      `json:"calibrate,omitempty"` // pairs of loopbacks that were compared, instead of pods
	Cores      []string `json:"cores"`
	Seed       uint64   `json:"seed"`
	Conflists  []string `json:"conflists,omitempty"`
	Extra      []Extra  `json:"extra,omitempty"` // contestants beside the product of modes, kinds and numbers
	IPv6       bool     `json:"ipv6"`
	UDP        bool     `json:"udp,omitempty"`
	TailRate   int      `json:"tail_rate,omitempty"` // requests a second of the tail scenario; 0: not measured
	MTU        int      `json:"mtu"`
	Tunes      []string `json:"tunes,omitempty"`
	StreamBy   string   `json:"stream_by"`
	CC         string   `json:"congestion_control"`
	CPUSource  string   `json:"cpu_source"`
	ClientCPU  int      `json:"client_cpu"`
	ServerCPU  int      `json:"server_cpu"` // of cross-core samples
}

// Extra is a contestant that was asked for by itself.
type Extra struct {
	Mode     string `json:"mode"`
	By       string `json:"services_by"`
	Services int    `json:"services"`
	Pods     int    `json:"pods,omitempty"` // on the node; 0: two
}

// Machine is where it ran.
type Machine struct {
	Kernel string `json:"kernel"`
	// Emulated says by what an emulated machine's clock goes: "" on a real one.
	// With EmulatedInstructions ratios are those of instruction counts; with
	// EmulatedTime they mean nothing.
	Emulated string            `json:"emulated,omitempty"`
	Arch     string            `json:"arch"`
	CPU      string            `json:"cpu"`
	CPUs     int               `json:"cpus"`
	MemoryMB int               `json:"memory_mb"`
	Load1    float64           `json:"load1_at_start"`
	Versions map[string]string `json:"versions"` // of the tools behind the contestants
	Sysctls  map[string]string `json:"sysctls"`
}

// Values of Machine.Emulated.
const (
	EmulatedInstructions = "instructions"
	EmulatedTime         = "time"
)

// Subject is one contestant reached one way: what a row of the tables is.
type Subject struct {
	ID         string `json:"id"` // the samples' subject
	Contestant string `json:"contestant"`
	Mode       string `json:"mode,omitempty"`
	By         string `json:"services_by,omitempty"`
	Services   int    `json:"services,omitempty"`
	Tune       string `json:"tune,omitempty"` // "" is as MTU says, with the kernel's bundles of 64 KiB
	Via        string `json:"via"`
	Pods       int    `json:"pods,omitempty"`     // on its node, where it is their number that counts
	Policies   int    `json:"policies,omitempty"` // NetworkPolicies, where it is their number that counts
	Position   string `json:"position,omitempty"` // of the Service's rule; "" where there is one, or a table is looked up
	// Backend names what implements it, with its version; ProgramSet is what
	// `mustang status -o json` printed there.
	Backend    string          `json:"backend,omitempty"`
	ProgramSet json.RawMessage `json:"program_set,omitempty"`
}

// BaseID is the subject that everything is divided by.
func (d *Document) BaseID() string { return cmp.Or(d.Settings.Base, Base) }

// AgainID is the base once more: the A/A control.
func (d *Document) AgainID() string { return AgainOf(d.BaseID()) }

// AgainOf names the A/A control of a base.
func AgainOf(base string) string { return base + " again" }

// FinishedRounds is how many rounds the document has.
func (d *Document) FinishedRounds() int {
	n := 0
	for _, s := range d.Samples {
		n = max(n, s.Round)
	}
	return n
}

// Empty says whether no round is finished.
func (d *Document) Empty() bool { return len(d.Samples) == 0 }

// Write writes the document beside path and renames it, so that an
// interruption never leaves half a file.
func (d *Document) Write(path string) error {
	var b bytes.Buffer
	if err := d.Encode(&b); err != nil {
		return err
	}
	return WriteWhole(path, b.Bytes())
}

// Encode writes the document as JSON.
func (d *Document) Encode(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	if err := e.Encode(d); err != nil {
		return fmt.Errorf("encode bench document: %w", err)
	}
	return nil
}

// Read reads a document that Write wrote.
func Read(path string) (*Document, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read bench document: %w", err)
	}
	d := &Document{}
	if err := json.Unmarshal(b, d); err != nil {
		return nil, fmt.Errorf("read bench document %s: %w", path, err)
	}
	if err := d.checkSchema(); err != nil {
		return nil, fmt.Errorf("read bench document %s: %w", path, err)
	}
	return d, nil
}

// checkSchema takes a document of the schema before as one of this.
func (d *Document) checkSchema() error {
	if d.Schema == schemaBefore {
		d.Schema = Schema
	}
	if d.Schema != Schema {
		return fmt.Errorf("schema %q, want %q", d.Schema, Schema)
	}
	return nil
}

// NoisyShare is the share of samples that others on the machine disturbed.
func (d *Document) NoisyShare() float64 {
	if len(d.Samples) == 0 {
		return 0
	}
	n := 0
	for _, s := range d.Samples {
		if s.Noisy {
			n++
		}
	}
	return float64(n) / float64(len(d.Samples))
}
