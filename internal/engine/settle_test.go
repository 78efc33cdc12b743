// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/datapath/bpfgen"
	"github.com/mustang-net/mustang/internal/state"
)

// Filters become links under a pod that goes on talking; wherever a process is
// killed on the way, the pod has programs, and the next one gets to the end.
func TestFiltersBecomeLinks(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	begun := func(t *testing.T, e *Engine) *Settling {
		t.Helper()
		s, err := e.Settle(0)
		if err != nil || s == nil {
			t.Fatal(s, err)
		}
		if slot, _, err := e.dp.Endpoints.Get(s.ep.ID); err != nil || slot.Flags&bpfgen.EPSettling == 0 {
			t.Errorf("%+v, %v: nothing says that its packets will meet both", slot, err)
		}
		return s
	}
	attached := func(t *testing.T, e *Engine) *Settling {
		t.Helper()
		s := begun(t, e)
		if s.Attach(); s.err != nil {
			t.Fatal(s.err)
		}
		return s
	}
	n := newNode(t)
	a, b := n.pod(1), n.pod(2)
	for name, killed := range map[string]func(*testing.T, *Engine) error{
		"not at all":               func(*testing.T, *Engine) error { return nil },
		"before it attached":       func(t *testing.T, e *Engine) error { return abandoned(begun(t, e)) },
		"before links were kept":   func(t *testing.T, e *Engine) error { return abandoned(attached(t, e)) },
		"before filters went":      func(t *testing.T, e *Engine) error { return keptOnly(e, attached(t, e)) },
		"before it was written":    func(t *testing.T, e *Engine) error { return unwritten(e, attached(t, e)) },
		"before that was said":     func(t *testing.T, e *Engine) error { return unsaid(e, attached(t, e)) },
		"after the other had gone": func(t *testing.T, e *Engine) error { return e.Settled(attached(t, e)) },
	} {
		t.Log("killed", name) // of what is said next
		n.opts.NoTCX = true
		for _, p := range []string{a, b} {
			if ep, err := n.add(p); err != nil || ep.Attach != datapath.AttachClsact {
				t.Fatal(ep, err)
			}
		}
		n.opts.NoTCX = false
		n.must(func(e *Engine) error { return killed(t, e) })
		n.ping(a, "10.9.0.2")
		n.must(settleAll)
		n.ping(a, "10.9.0.2")
		for i, ep := range n.endpoints() {
			if ep.Attach != datapath.AttachTCX || !ep.Qdisc {
				t.Errorf("%+v", ep)
			}
			n.must(func(e *Engine) error { return e.CheckEndpoint(ep.ID) })
			if n.settling(ep.ID) {
				t.Errorf("endpoint %d is said to have both yet", ep.ID)
			}
			host := []string{"h1", "h2"}[i]
			if f := n.run("tc filter show dev %[1]s ingress; tc filter show dev %[1]s egress", host); f != "" {
				t.Errorf("left behind: %s", f)
			}
			// To take the qdisc off would lose packets of a pod that is at work.
			if q := n.run("tc qdisc show dev %s", host); !strings.Contains(q, "clsact") {
				t.Errorf("%s has no clsact any more: %s", host, q)
			}
			if ingress := linksAt(t, host, ebpf.AttachTCXIngress); ingress != 1 {
				t.Errorf("%d programs at %s", ingress, host)
			}
			n.must(func(e *Engine) error { return e.RemoveEndpoint(ep.ID) })
			if q := n.run("tc qdisc show dev %s", host); strings.Contains(q, "clsact") {
				t.Errorf("left behind: %s", q)
			}
		}
	}
}

// settleAll gives all endpoints their links.
func settleAll(e *Engine) error {
	for {
		s, err := e.Settle(0)
		if err != nil || s == nil {
			return err
		}
		s.Attach()
		if err := e.Settled(s); err != nil {
			return err
		}
	}
}

// An endpoint that goes meanwhile takes its links with it.
func TestSettlingAnEndpointThatGoes(t *testing.T) {
	if !datapath.Probe().TCX {
		t.Skip("this kernel has no tcx")
	}
	n := newNode(t)
	for pod, goes := range map[string]func(*Settling) error{
		n.pod(1): func(s *Settling) error { s.Attach(); return nil },
		n.pod(2): func(s *Settling) error { // with its interface, so that Attach fails
			err := netlink.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: s.ep.IfIndex}})
			s.Attach()
			return err
		},
	} {
		n.opts.NoTCX = true
		ep, err := n.add(pod)
		if err != nil {
			t.Fatal(err)
		}
		n.opts.NoTCX = false
		n.must(func(e *Engine) error {
			s, err := e.Settle(0)
			if err != nil || s == nil {
				return errors.Join(err, errors.New("nothing is to settle"))
			}
			if err := errors.Join(goes(s), e.RemoveEndpoint(ep.ID)); err != nil {
				return err
			}
			return e.Settled(s)
		})
	}
	if left := linksAt(t, "h1", ebpf.AttachTCXIngress); left != 0 {
		t.Errorf("%d programs are left", left)
	}
}

func (n *node) settling(id uint32) (is bool) {
	n.must(func(e *Engine) error {
		slot, _, err := e.dp.Endpoints.Get(id)
		is = slot.Flags&bpfgen.EPSettling != 0
		return err
	})
	return is
}

func keptOnly(e *Engine, s *Settling) error {
	if err := e.dp.KeepLinks(s.links); err != nil {
		return err
	}
	return abandoned(s)
}

func unsaid(e *Engine, s *Settling) error {
	if err := e.keep(s); err != nil {
		return err
	}
	return abandoned(s)
}

// abandoned is what the kernel does with the descriptors of a process that is killed.
func abandoned(s *Settling) error { return s.links.Close() }

func unwritten(e *Engine, s *Settling) error {
	ep := e.known[s.ep.ID]
	if err := e.Settled(s); err != nil {
		return err
	}
	e.known = map[uint32]state.Endpoint{}
	return e.store.PutEndpoint(ep)
}

func linksAt(t *testing.T, ifname string, at ebpf.AttachType) int {
	t.Helper()
	l, err := netlink.LinkByName(ifname)
	if err != nil {
		t.Fatal(err)
	}
	found, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: at})
	if err != nil {
		t.Fatal(err)
	}
	return len(found.Programs)
}
