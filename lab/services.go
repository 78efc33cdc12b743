// SPDX-License-Identifier: Apache-2.0

package lab

// Services, by whatever the lab's configuration names.

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

// AddServices adds Services to the node, in as few batches as the tool at hand
// bears. It may be called again with more. By the kernel's own means 5,000 take
// seconds; 100,000 take a minute by iptables-legacy, half a minute by nft with
// one backend each (many minutes with more), and by iptables-nft there is no
// end to it. When it fails, earlier batches stay.
func (n *Node) AddServices(ctx context.Context, services []Service) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	by := n.lab.cfg.Services
	if by == NoServices {
		return errors.New("this lab has no Services: set Config.Services")
	}
	seen := make(map[string]bool, len(services))
	for _, s := range services {
		if err := s.validate(); err != nil {
			return err
		}
		if n.services[s.String()] || seen[s.String()] {
			return fmt.Errorf("service %s is there already", s)
		}
		seen[s.String()] = true
	}
	for batch := range slices.Chunk(services, batchSize(by, services)) {
		if err := n.addServices(ctx, by, batch); err != nil {
			return err
		}
		for _, s := range batch {
			n.services[s.String()] = true
		}
	}
	return nil
}

// batchSize is where the time of one batch begins to grow with its square.
func batchSize(by ServiceBy, services []Service) int {
	switch by {
	case IptablesNFT:
		return 2000 // the tool compares each chain's name with all others'
	case NFT:
		// The kernel walks the whole transaction for each map in it.
		if slices.ContainsFunc(services, func(s Service) bool { return len(s.Backends) > 1 }) {
			return 1000
		}
	}
	return max(1, len(services))
}

func (n *Node) addServices(ctx context.Context, by ServiceBy, services []Service) error {
	if !by.kernel() {
		return n.applyByMustang(ctx, services)
	}
	first := len(n.services) == 0
	for _, v6 := range []bool{false, true} {
		var mine []Service
		for _, s := range services {
			if s.VIP.Is6() == v6 {
				mine = append(mine, s)
			}
		}
		if len(mine) == 0 && !first {
			continue
		}
		r := ruleset{v6: v6, first: first, masqueradeAll: n.lab.cfg.Mode.siblings(), podCIDR: n.PodNet4}
		if v6 {
			r.podCIDR = n.PodNet6
		}
		if err := n.load(ctx, by, r, mine); err != nil {
			return err
		}
	}
	return nil
}

// ruleset is what the rules for one family depend on.
type ruleset struct {
	v6      bool
	first   bool // nothing of ours is there yet
	podCIDR netip.Prefix
	// macvlan, ipvlan: pods answer each other directly. Only with the host's
	// address as the source does the answer return through the host, which has
	// the translation to undo.
	masqueradeAll bool
}

// load feeds one family's rules to the tool that loads them.
func (n *Node) load(ctx context.Context, by ServiceBy, r ruleset, services []Service) error {
	argv := []string{"nft", "-f", "-"}
	var rules []byte
	if by == NFT {
		rules = r.nft(services)
	} else {
		argv = []string{r.iptablesRestore(by), "-w", "10", "--noflush"}
		rules = r.iptables(services)
	}
	if _, err := exec.LookPath(argv[0]); err != nil {
		return fmt.Errorf("services by %s need %s: install it", by, argv[0])
	}
	c := n.Command(ctx, argv...)
	c.Stdin = bytes.NewReader(rules)
	// iptables-legacy's lock is one file for the whole machine, and it stays.
	c.Env = append(c.Env, "XTABLES_LOCKFILE="+filepath.Join(n.lab.info.dir(), "xtables.lock"))
	_, err := runQuiet(c, fmt.Sprintf("load %d services by %s", len(services), argv[0]))
	return err
}

// appliedService is an element of what `mustang svc apply` reads.
type appliedService struct {
	Service  string   `json:"service"`
	Protocol string   `json:"protocol"`
	Backends []string `json:"backends"`
}

func (n *Node) applyByMustang(ctx context.Context, services []Service) error {
	list := make([]appliedService, 0, len(services))
	for _, s := range services {
		a := appliedService{netip.AddrPortFrom(s.VIP, s.Port).String(), s.Protocol, []string{}}
		for _, b := range s.Backends {
			a.Backends = append(a.Backends, b.String())
		}
		list = append(list, a)
	}
	raw, err := json.Marshal(list)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(n.lab.info.dir(), "services-*.json")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	_, err = n.Mustang(ctx, "svc", "apply", "-f", f.Name())
	return err
}

// id is kube-proxy's way of naming a chain: 16 base32 characters of a hash.
func id(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write([]byte(p))
	}
	return base32.StdEncoding.EncodeToString(h.Sum(nil))[:16]
}
