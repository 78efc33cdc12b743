// SPDX-License-Identifier: Apache-2.0

package samehost

// When kube-proxy's rules are all there, and where in its list those under test stand.

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/bench/report"
	"github.com/mustang-net/mustang/lab"
)

const kubeProxyMetrics = "127.0.0.1:10249"

// kubeProxyInForce waits until kube-proxy says that it has nothing left to do, and every
// Service is in its rules.
func kubeProxyInForce(ctx context.Context, n *lab.Node, mode string, services []lab.Service) error {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = n.Do(func() error { c, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
		return c, err
	}}}
	defer client.CloseIdleConnections()
	v6 := services[0].VIP.Is6()
	for {
		err := syncedBy(ctx, client, v6)
		if err == nil {
			var there map[string]bool
			if there, err = kubeProxyFrontends(ctx, n, mode, v6); err == nil {
				err = missingFrontends(services, there)
			}
		}
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("its rules are not all in force: %w (%w)", err, context.Cause(ctx))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// syncedBy asks kube-proxy's metrics whether all that it heard is in its rules.
func syncedBy(ctx context.Context, client *http.Client, v6 bool) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+kubeProxyMetrics+"/metrics", nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask for its metrics: %w", err)
	}
	defer resp.Body.Close()
	var text bytes.Buffer
	if _, err := text.ReadFrom(resp.Body); err != nil {
		return fmt.Errorf("read its metrics: %w", err)
	}
	return synced(text.String(), v6)
}

// synced says from kube-proxy's metrics why not all that it heard is in the rules of a
// family. The pending changes are counted for both families at once, and are 0 while rules
// are being written; the times are each family's own, and are set after that.
func synced(metrics string, v6 bool) error {
	const prefix = "kubeproxy_sync_proxy_rules_"
	family := map[bool]string{false: `{ip_family="IPv4"}`, true: `{ip_family="IPv6"}`}[v6]
	values := map[string]float64{}
	for line := range strings.Lines(metrics) {
		name, text, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || !strings.HasPrefix(name, prefix) {
			continue
		}
		if v, err := strconv.ParseFloat(text, 64); err == nil {
			values[strings.TrimPrefix(name, prefix)] = v
		}
	}
	for _, pending := range []string{"service_changes_pending", "endpoint_changes_pending"} {
		if v, ok := values[pending]; !ok || v != 0 {
			return fmt.Errorf("%s%s is %v (there: %v)", prefix, pending, v, ok)
		}
	}
	queued, wasQueued := values["last_queued_timestamp_seconds"+family]
	last, wasWritten := values["last_timestamp_seconds"+family]
	if !wasQueued || !wasWritten || last < queued {
		return fmt.Errorf("%slast_timestamp_seconds%s is %.3f, last queued %.3f", prefix, family, last, queued)
	}
	return nil
}

// kubeProxyFrontends are those that the rules of a family lead to endpoints, as
// lab.Service.String writes them.
func kubeProxyFrontends(ctx context.Context, n *lab.Node, mode string, v6 bool) (map[string]bool, error) {
	argv := natTable(v6)
	if mode == "nftables" {
		argv = []string{"nft", "list", "map", map[bool]string{false: "ip", true: "ip6"}[v6], "kube-proxy", "service-ips"}
	}
	out, err := output(ctx, n, nil, argv...)
	if err != nil {
		return nil, err
	}
	return frontends(out), nil
}

var (
	iptablesFrontend = regexp.MustCompile(`^-A KUBE-SERVICES -d (\S+)/\d+ -p (\w+) .*--dport (\d+) -j KUBE-(?:SVC|SVL|EXT)-`)
	nftFrontend      = regexp.MustCompile(`(\S+) \. (\w+) \. (\d+)[^,:]* : goto `)
)

// frontends finds Services in what iptables-save or nft list map print.
func frontends(rules []byte) map[string]bool {
	found := map[string]bool{}
	add := func(m [][]byte) {
		addr, err := netip.ParseAddr(string(m[1]))
		port, portErr := strconv.ParseUint(string(m[3]), 10, 16)
		if err == nil && portErr == nil {
			found[lab.Service{VIP: addr, Port: uint16(port), Protocol: string(m[2])}.String()] = true
		}
	}
	lines := bufio.NewScanner(bytes.NewReader(rules))
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		if m := iptablesFrontend.FindSubmatch(lines.Bytes()); m != nil {
			add(m)
			continue
		}
		for _, m := range nftFrontend.FindAllSubmatch(lines.Bytes(), -1) {
			add(m)
		}
	}
	return found
}

// missingFrontends names the Services that are not there, by up to three of them.
func missingFrontends(services []lab.Service, there map[string]bool) error {
	var missing []string
	for _, s := range services {
		if !there[s.String()] {
			missing = append(missing, s.String())
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d Services are not in the rules: %s, …", len(missing), len(services), strings.Join(missing[:min(3, len(missing))], ", "))
}

// placeTested puts the rules of the Services under test where their position says:
// kube-proxy writes them in no order.
func placeTested(ctx context.Context, n *lab.Node, tested []testedService) error {
	v6 := tested[0].vip.Addr().Is6()
	rules, err := output(ctx, n, nil, natTable(v6)...)
	if err != nil {
		return err
	}
	ordered, err := placed(rules, tested)
	if err != nil {
		return err
	}
	restore := map[bool]string{false: "iptables-restore", true: "ip6tables-restore"}[v6]
	_, err = output(ctx, n, ordered, restore, "-w", "10", "--noflush", "--table", "nat")
	return err
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

// natTable prints the table that has the Services. The tool is the one that kube-proxy
// finds, in whichever of the kernel's two ways it works.
func natTable(v6 bool) []string {
	return []string{map[bool]string{false: "iptables-save", true: "ip6tables-save"}[v6], "--table", "nat"}
}

// output runs a program on the node and returns what it prints.
func output(ctx context.Context, n *lab.Node, input []byte, argv ...string) ([]byte, error) {
	cmd := n.Command(ctx, argv...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, bytes.TrimSpace(errs.Bytes()))
	}
	return out.Bytes(), nil
}
