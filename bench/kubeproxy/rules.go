// SPDX-License-Identifier: Apache-2.0

package kubeproxy

// When all of kube-proxy's rules are there.

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

const metricsAddress = "127.0.0.1:10249"

// UntilInForce waits until kube-proxy says that it has nothing left to do, and every
// Service, all of one family, is in its rules.
func (p *Proxy) UntilInForce(ctx context.Context, services []lab.Service) error {
	var why error // the last one that is not the end of ctx
	for {
		err := p.synced(ctx, services[0].VIP.Is6())
		if err == nil {
			err = p.missing(ctx, services)
		}
		if err == nil {
			return nil
		}
		if why == nil || ctx.Err() == nil {
			why = err
		}
		if kube.Ended(p.PID()) {
			return fmt.Errorf("waited for kube-proxy's rules, %w; %s", why, p.Found(ctx, services))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited for kube-proxy's rules (%w), %w; %s", context.Cause(ctx), why, p.Found(ctx, services))
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// lookTime is for a last look at the rules, when the time to wait is over.
const lookTime = 20 * time.Second

// Found says, when something was waited for in vain, how many Services are not in the rules,
// and what kube-proxy is doing.
func (p *Proxy) Found(ctx context.Context, services []lab.Service) string {
	if errors.Is(ctx.Err(), context.Canceled) {
		return "interrupted"
	}
	doing := p.Doing()
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTime)
	defer cancel()
	text := fmt.Sprintf("all %d Services are in the rules", len(services))
	if errors.Is(p.synced(look, services[0].VIP.Is6()), errNothing) {
		// Reading the rules while they are being written for the first time can take long.
		text = missing(services, nil).Error()
	} else if err := p.missing(look, services); look.Err() != nil {
		text = fmt.Sprintf("how many of %d Services are missing in the rules is unknown: they cannot be read within %v", len(services), lookTime)
	} else if err != nil {
		text = err.Error()
	}
	return text + "; " + doing
}

// missing says which Services are not in the rules.
func (p *Proxy) missing(ctx context.Context, services []lab.Service) error {
	there, err := p.frontends(ctx, services[0].VIP.Is6())
	if err != nil {
		return err
	}
	return missing(services, there)
}

// frontends are those that the rules lead to endpoints, as lab.Service.String writes them.
func (p *Proxy) frontends(ctx context.Context, v6 bool) (map[string]bool, error) {
	if p.kind.Mode() == "iptables" {
		rules, err := p.NATTable(ctx, v6)
		return frontends(rules), err
	}
	out, err := p.output(ctx, nil, "nft", "list", "map", map[bool]string{false: "ip", true: "ip6"}[v6], "kube-proxy", "service-ips")
	if err != nil && strings.Contains(err.Error(), "No such file or directory") {
		return nil, nil // kube-proxy has not made it yet
	}
	return frontends(out), err
}

// synced asks kube-proxy's metrics whether all that it heard is in its rules.
func (p *Proxy) synced(ctx context.Context, v6 bool) error {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = p.node.Do(func() error { c, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
		return c, err
	}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metricsAddress+"/metrics", nil)
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

// errNothing is a kube-proxy that has not written a family's rules for once.
var errNothing = errors.New("kube-proxy has not loaded any rules yet")

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
	queued, wasQueued := values["last_queued_timestamp_seconds"+family]
	last, wasWritten := values["last_timestamp_seconds"+family]
	if wasQueued && last == 0 { // or not there at all
		return errNothing
	}
	for _, pending := range []string{"service_changes_pending", "endpoint_changes_pending"} {
		if v, ok := values[pending]; !ok || v != 0 {
			return fmt.Errorf("%s%s is %v (there: %v)", prefix, pending, v, ok)
		}
	}
	if !wasQueued || !wasWritten || last < queued {
		return fmt.Errorf("%slast_timestamp_seconds%s is %.3f, last queued %.3f", prefix, family, last, queued)
	}
	return nil
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

// missing names the Services that are not there, by up to three of them.
func missing(services []lab.Service, there map[string]bool) error {
	var names []string
	for _, s := range services {
		if !there[s.String()] {
			names = append(names, s.String())
		}
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d Services are missing in the rules, the first of them: %s", len(names), len(services), strings.Join(names[:min(3, len(names))], ", "))
}

// NATTable is iptables' table that has the Services, as the backend's iptables-save prints it.
func (p *Proxy) NATTable(ctx context.Context, v6 bool) ([]byte, error) {
	return p.output(ctx, nil, p.kind.tool(v6, "save"), "--table", "nat")
}

// RestoreNAT changes that table by iptables-restore's input: chains that it declares are
// written anew.
func (p *Proxy) RestoreNAT(ctx context.Context, v6 bool, rules []byte) error {
	_, err := p.output(ctx, rules, p.kind.tool(v6, "restore"), "-w", "10", "--noflush", "--table", "nat")
	return err
}

// output runs a program on the node and returns what it prints.
func (p *Proxy) output(ctx context.Context, input []byte, argv ...string) ([]byte, error) {
	cmd := p.node.Command(ctx, argv...)
	cmd.Env = append(cmd.Env, p.env...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, bytes.TrimSpace(errs.Bytes()))
	}
	return out.Bytes(), nil
}
