// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/mustang-net/mustang/internal/datapath"
	"github.com/mustang-net/mustang/internal/reconcile"
	"github.com/mustang-net/mustang/internal/service"
	"github.com/mustang-net/mustang/internal/state"
)

var compareAddrs = cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })

func TestServicesAreRestoredFromTheTables(t *testing.T) {
	n := newNode(t)
	list := []state.Service{svc("10.96.0.1:80", "10.9.0.1:80", "10.9.0.2:80"), svc("[fd00::1]:80", "[fd09::1]:80"), svc("10.96.0.1:81")}
	n.must(func(e *Engine) error { return e.AddServices(list...) })
	want := []state.Binding{bound(t, list[0]), bound(t, list[1]), bound(t, list[2])}
	for i := range want {
		want[i].Number = uint32(i + 1)
	}
	if d := cmp.Diff(want, n.services(), compareAddrs); d != "" {
		t.Fatal(d)
	}
	err := n.do(func(e *Engine) error { return e.AddServices(svc("10.96.0.1:80")) })
	if err == nil || !strings.Contains(err.Error(), "duplicate") {
		t.Fatal(err)
	}
	n.must(func(e *Engine) error { return e.RemoveServices(want[1].Frontend) })
	if d := cmp.Diff([]state.Binding{want[0], want[2]}, n.services(), compareAddrs); d != "" {
		t.Fatal(d)
	}
	err = n.do(func(e *Engine) error { return e.RemoveServices(want[1].Frontend) })
	if !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
}

// breaking makes the n-th write to any table of Services fail.
type breaking struct {
	left    int
	err     error
	forEver bool // and those after it
}

func (b *breaking) write() error {
	b.left--
	if b.left == 0 || b.forEver && b.left < 0 {
		return b.err
	}
	return nil
}

type breakingTable[K, V comparable] struct {
	reconcile.Table[K, V]
	b *breaking
}

func (t breakingTable[K, V]) Put(k []K, v []V) error {
	if len(k) > 0 {
		if err := t.b.write(); err != nil {
			return err
		}
	}
	return t.Table.Put(k, v)
}

func (b *breaking) wrap(t reconcile.ServiceTables) reconcile.ServiceTables {
	return reconcile.ServiceTables{
		Frontends: breakingTable[datapath.FrontendKey, datapath.Frontend]{t.Frontends, b},
		Slots:     breakingTable[datapath.SlotKey, uint32]{t.Slots, b},
		Backends:  breakingTable[uint32, datapath.Backend]{t.Backends, b},
		Sources:   breakingTable[datapath.SourceKey, uint8]{t.Sources, b},
		Meta:      breakingTable[uint32, datapath.Meta]{t.Meta, b},
	}
}

func TestAFailedWriteKeepsTheServicesInForce(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(twoServices()...) })
	before := n.services()
	fault := errors.New("injected fault")
	for i := 1; ; i++ {
		n.opts.Faults = (&breaking{left: i, err: fault}).wrap
		err := n.do(func(e *Engine) error { return e.UpsertServices(threeServices()) })
		n.opts.Faults = nil
		if err == nil {
			if i < 6 {
				t.Fatalf("only %d writes", i)
			}
			break
		}
		if !errors.Is(err, fault) {
			t.Fatal(err)
		}
		if d := cmp.Diff(before, n.services(), compareAddrs); d != "" {
			t.Fatalf("write %d failed: %s", i, d)
		}
	}
	if got := n.services(); len(got) != 3 {
		t.Fatal(got)
	}
}

func TestAFullTableRefusesAndSaysSo(t *testing.T) {
	n := newNode(t)
	n.opts.Sizes.Services = 8
	n.must(func(e *Engine) error { return e.AddServices(svc("10.96.0.1:80", "10.9.0.1:80")) })
	var many []state.Service
	for i := range 8 {
		many = append(many, svc(fmt.Sprintf("10.96.1.%d:80", i+1), "10.9.0.1:80"))
	}
	err := n.do(func(e *Engine) error { return e.UpsertServices(many) })
	if full := (*datapath.FullError)(nil); !errors.As(err, &full) {
		t.Fatal(err)
	}
	if got := n.services(); len(got) != 1 {
		t.Fatal(got)
	}
}

func TestAnotherLayoutIsRefused(t *testing.T) {
	n := newNode(t)
	n.must(func(*Engine) error { return nil })
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 8, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Pin(n.scope.BPFFS + "/maps/mst_ct_v0"); err != nil {
		t.Fatal(err)
	}
	_, err = Open(context.Background(), n.scope, n.opts)
	if err == nil || !strings.Contains(err.Error(), "mustang reset") {
		t.Fatal(err)
	}
}

func TestASecondToolWaitsForTheFirst(t *testing.T) {
	n := newNode(t)
	e := n.open()
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	if _, err := Open(ctx, n.scope, n.opts); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		e, err := Open(context.Background(), n.scope, n.opts)
		if err == nil {
			err = e.Close()
		}
		done <- err
	}()
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestNoBPFFSIsOneSentenceWithTheMend(t *testing.T) {
	_, err := Open(context.Background(), Scope{BPFFS: t.TempDir() + "/m", StateDir: t.TempDir()}, Options{})
	if err == nil || !strings.Contains(err.Error(), "mount -t bpf bpf") {
		t.Fatal(err)
	}
}

// This is `svc apply` of 100,000 Services. How long that takes is the machine's
// affair (seconds); that ten times as many take ten times as long is ours. Four
// times more is allowed for a machine that has other work at one of the moments;
// what compares each Service with every other would take a hundred times as long.
func TestManyServicesTakeTimeInProportion(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	took := func(count int) (added, restored time.Duration) {
		n := newNode(t)
		n.opts.Sizes = datapath.Sizes{CT: 1024, CTNew: 1024}
		var list []state.Service
		for i := range count {
			front := fmt.Sprintf("10.%d.%d.%d:80", 100+i>>16, byte(i>>8), byte(i))
			list = append(list, svc(front, fmt.Sprintf("10.9.%d.%d:80", byte(i>>8), byte(i))))
		}
		start := time.Now()
		n.must(func(e *Engine) error { return e.UpsertServices(list) })
		added = time.Since(start)
		start = time.Now()
		if got := len(n.services()); got != count {
			t.Fatalf("%d of %d Services are there", got, count)
		}
		restored = time.Since(start)
		t.Logf("%d Services: added in %v, restored in %v", count, added, restored)
		return added, restored
	}
	added, restored := took(10_000)
	addedAll, restoredAll := took(100_000)
	if addedAll > 40*added || restoredAll > 40*restored {
		t.Error("ten times as many Services took more than forty times as long")
	}
}

// The policy Local of a command-line Service follows the endpoints.
func TestWhatIsLocalFollowsTheEndpoints(t *testing.T) {
	n := newNode(t)
	list, err := service.Parse(service.Spec{Service: "10.96.0.1:80", Protocol: "tcp", Backends: []string{"10.9.0.2:80", "192.0.2.9:80"}, InternalPolicy: "Local"})
	if err != nil {
		t.Fatal(err)
	}
	list[0].Owner = state.OwnerCLI
	n.must(func(e *Engine) error { return e.AddServices(list...) })
	leads := func(want string, drops bool) {
		t.Helper()
		got := n.services()
		if len(got) != 1 || fmt.Sprint(got[0].Backends) != want || got[0].Drop != drops {
			t.Fatalf("%+v, want %s", got, want)
		}
	}
	leads("[]", true)
	ep, err := n.add(n.pod(2))
	if err != nil {
		t.Fatal(err)
	}
	leads("[10.9.0.2:80]", false)
	n.must(func(e *Engine) error { return e.RemoveEndpoint(ep.ID) })
	leads("[]", true)
	// The node's own address is here as well.
	own := func(change func(netlink.Link, *netlink.Addr) error) {
		n.must(func(e *Engine) error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			return errors.Join(change(lo, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(192, 0, 2, 9))}), e.UpsertServices(list))
		})
	}
	own(netlink.AddrAdd)
	leads("[192.0.2.9:80]", false)
	own(netlink.AddrDel)
	leads("[]", true)
	// Those of a killed tool, too, which the next one finishes.
	n.must(func(e *Engine) error { return e.store.WriteJournal(operation{Kind: opAddEndpoint, Endpoint: &ep}) })
	leads("[10.9.0.2:80]", false)
	n.must(func(e *Engine) error { return e.store.WriteJournal(operation{Kind: opRemoveEndpoint, Endpoint: &ep}) })
	leads("[]", true)
}

// Another owner's whole set leaves the command line's Services alone, also when
// it wants one of their frontends, and after a restart.
func TestNobodyPrunesAnothersServices(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(svc("10.96.0.1:80", "10.9.0.1:80")) })
	theirs := func(name, f string) state.Service {
		s := svc(f, "10.9.0.2:80")
		s.ServiceID = state.ServiceID{Owner: state.OwnerKubernetes, Namespace: "default", Name: name}
		return s
	}
	only := func(problems int, list ...state.Service) {
		t.Helper()
		n.must(func(e *Engine) error {
			got, err := makeAll(e, list)
			if len(got) != problems || problems > 0 && !strings.Contains(got[0].Error(), "service default/thief: tcp 10.96.0.1:80 belongs to cli's") {
				t.Errorf("%v", got)
			}
			return err
		})
	}
	only(1, theirs("web", "10.96.0.2:80"), theirs("thief", "10.96.0.1:80"))
	err := n.do(func(e *Engine) error { return e.UpsertServices([]state.Service{svc("10.96.0.2:80", "10.9.0.1:80")}) })
	if err == nil || !strings.Contains(err.Error(), "belongs to kubernetes") {
		t.Error(err)
	}
	err = n.do(func(e *Engine) error { return e.RemoveServices(front(svc("10.96.0.2:80"))) })
	if err == nil || !strings.Contains(err.Error(), "belongs to kubernetes") {
		t.Error(err)
	}
	only(0)
	if got := n.services(); len(got) != 1 || got[0].Owner != state.OwnerCLI || fmt.Sprint(got[0].Backends) != "[10.9.0.1:80]" {
		t.Errorf("%+v", got)
	}
}

// One change of one backend is a few writes, and none of what is as it was.
func TestOnlyWhatDiffersIsWritten(t *testing.T) {
	n := newNode(t)
	var list []state.Service
	for i := range 200 {
		s := svc(fmt.Sprintf("10.96.1.%d:80", i), "10.9.0.1:80", "10.9.0.2:80", "10.9.0.3:80")
		s.Owner = state.OwnerKubernetes
		list = append(list, s)
	}
	n.must(func(e *Engine) error {
		_, err := makeAll(e, list)
		return err
	})
	count := &breaking{left: 1 << 30}
	n.opts.Faults = count.wrap
	defer func() { n.opts.Faults = nil }()
	n.must(func(e *Engine) error {
		if _, err := makeAll(e, list); err != nil || count.left != 1<<30 {
			t.Errorf("the same again: %d writes, %v", 1<<30-count.left, err)
		}
		list[7].Ports[0].Backends = list[7].Ports[0].Backends[1:]
		_, err := makeAll(e, list)
		if writes := 1<<30 - count.left; writes == 0 || writes > 6 {
			t.Errorf("one backend less: %d writes", writes)
		}
		return err
	})
}

// An error is that nothing has changed, also when it is the record that could not be written.
func TestAServiceWithoutRoomForItsRecordIsUndone(t *testing.T) {
	n := newNode(t)
	n.must(func(e *Engine) error { return e.AddServices(svc("10.96.0.1:80", "10.0.0.1:80")) })
	before := n.services()
	dir := filepath.Join(n.scope.StateDir, "services")
	stands := filepath.Join(dir, ".new-"+url.PathEscape("cli tcp 10.96.0.2:80")+".json", "in the way")
	if err := os.MkdirAll(stands, 0o700); err != nil {
		t.Fatal(err)
	}
	more := []state.Service{svc("10.96.0.1:80", "10.0.0.2:80"), svc("10.96.0.2:80", "10.0.0.1:80")}
	for i := range more {
		more[i].Affinity = time.Hour
	}
	err := n.do(func(e *Engine) error { return e.UpsertServices(more) })
	if err == nil {
		t.Fatal("it could be written")
	}
	if err := os.RemoveAll(filepath.Dir(stands)); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, n.services(), compareAddrs); d != "" {
		t.Errorf("%v, and yet: %s", err, d)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) > 0 {
		t.Errorf("records of what is not there: %v, %v", files, err)
	}
}
