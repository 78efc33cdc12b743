// SPDX-License-Identifier: Apache-2.0

package samehost

// Where in kube-proxy's list of rules the Services under test stand.

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/mustang-net/mustang/bench/kubeproxy"
	"github.com/mustang-net/mustang/bench/report"
)

// place puts the rules of the Services under test where their position says: kube-proxy
// writes them in no order.
func place(ctx context.Context, proxy *kubeproxy.Proxy, tested []testedService) error {
	v6 := tested[0].vip.Addr().Is6()
	rules, err := proxy.NATTable(ctx, v6)
	if err != nil {
		return err
	}
	ordered, err := placed(rules, tested)
	if err != nil {
		return err
	}
	return proxy.RestoreNAT(ctx, v6, ordered)
}

// placed is the input of iptables-restore --noflush that writes KUBE-SERVICES anew, from
// what iptables-save prints: the middle one behind half of the others, the last one behind
// all, kube-proxy's own last rule behind that.
func placed(rules []byte, tested []testedService) ([]byte, error) {
	var others []string
	at := map[string][]string{} // position to rules: a Service of two protocols has two
	end := ""
	for line := range strings.Lines(string(rules)) {
		if !strings.HasPrefix(line, "-A KUBE-SERVICES ") {
			continue
		}
		position := ""
		for _, t := range tested {
			if strings.Contains(line, " -d "+single(t.vip.Addr())+" ") {
				position = t.position
			}
		}
		switch {
		case position != "":
			at[position] = append(at[position], line)
		case strings.Contains(line, "-j KUBE-NODEPORTS"):
			end += line
		default:
			others = append(others, line)
		}
	}
	for _, t := range tested {
		if len(at[t.position]) == 0 {
			return nil, fmt.Errorf("KUBE-SERVICES has no rule of %s, which is to be its %s", t.vip, t.position)
		}
	}
	half := (len(others) + 1) / 2
	var b bytes.Buffer
	b.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	for _, part := range [][]string{others[:half], at[report.Middle], others[half:], at[report.Last], {end, "COMMIT\n"}} {
		b.WriteString(strings.Join(part, ""))
	}
	return b.Bytes(), nil
}

func single(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }
