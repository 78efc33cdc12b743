// SPDX-License-Identifier: Apache-2.0

package bpfgen

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// everGiven lists every reason that was ever given a number, from 0. A new one
// is added at the end; one that changes breaks whoever reads counters.
const everGiven = `
	none no_program no_endpoint ethertype truncated bad_length bad_header ext_headers
	spoofed_mac spoofed_address frag_tiny frag_overlap frag_no_first no_backend service_port
	midstream_nat ct_full nat_ports nat_failed deliver icmp_error_nat icmp_error_flow
	unknown_child hook_bypassed wire_spoofed tunnel_peer tunnel_source tunnel_vni no_remote encap
	no_local_backend source_range no_route policy_ingress policy_egress policy_incomplete policy_unknown
	sctp_fragment tunnel_port hop_limit too_long
`

func TestReasonsAreAppendOnly(t *testing.T) {
	given := strings.Fields(everGiven)
	if len(given) > len(Reasons) {
		t.Fatalf("%d reasons, %d once were", len(Reasons), len(given))
	}
	for n, r := range Reasons {
		if int(r.Number) != n || r.Name == "" || r.Sentence == "" || r.Mend == "" {
			t.Errorf("reason %d is %+v; in bpf/reasons.h it needs a number, a sentence, and after \"mend:\" what to do about it", n, r)
		}
		if n >= len(given) {
			t.Errorf("add %q to everGiven", r.Name)
		} else if given[n] != r.Name {
			t.Errorf("reason %d was %q and is now %q", n, given[n], r.Name)
		}
	}
}

func TestThePageOfReasonsIsCurrent(t *testing.T) {
	page, err := os.ReadFile("../../../docs/reasons.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Reasons[1:] {
		line := fmt.Sprintf("| %d | `%s` | %s | %s |\n", r.Number, r.Name, r.Sentence, r.Mend)
		if !strings.Contains(string(page), line) {
			t.Errorf("docs/reasons.md lacks %q; `go generate ./internal/...` writes it anew", line)
		}
	}
}
