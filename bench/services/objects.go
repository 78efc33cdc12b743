// SPDX-License-Identifier: Apache-2.0

package services

// Pods, and objects of the API.

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/mustang-net/mustang/lab"
	"github.com/mustang-net/mustang/test/kube"
)

const (
	nodeName   = "n1"
	serverPort = 8080
	measured   = 800_000 // the measured Service's number; those that only fill the tables are below
	services   = kube.ServicesPath
	slicesOf   = kube.SlicesPath
	writers    = 8 // requests at once
)

type object map[string]any

// vip begins beyond the address that the API server takes for itself.
func vip(n int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 97 + byte(n>>16), byte(n >> 8), byte(n)}), 80)
}

// asked is the Service of a number as rules have it.
func asked(n int) lab.Service {
	return lab.Service{VIP: vip(n).Addr(), Port: vip(n).Port(), Protocol: "tcp"}
}

func nameOf(n int) string { return fmt.Sprintf("s%d", n) }

// pods makes a client and two servers; each says its name to who connects.
func (b *bench) pods(ctx context.Context) (stop func(), err error) {
	var listeners []net.Listener
	var done sync.WaitGroup
	stop = func() {
		for _, l := range listeners {
			l.Close()
		}
		done.Wait()
	}
	if b.client, err = b.lab.Node().AddPod(ctx, "client"); err != nil {
		return stop, err
	}
	for i := range b.servers {
		p, err := b.lab.Node().AddPod(ctx, fmt.Sprintf("server%d", i))
		if err != nil {
			return stop, err
		}
		b.servers[i] = p
		var l net.Listener
		if err := p.Do(func() (err error) {
			l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", serverPort))
			return err
		}); err != nil {
			return stop, err
		}
		listeners = append(listeners, l)
		done.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, p.Name)
				c.Close()
			}
		})
	}
	// kube-proxy waits half a minute for the Node to have an address.
	node := object{"metadata": object{"name": nodeName}, "status": object{"addresses": []object{{"type": "InternalIP", "address": b.lab.Node().IPv4.String()}}}}
	return stop, b.api.Do(ctx, http.MethodPost, "/api/v1/nodes", node, nil)
}

func service(n int) object {
	return object{
		"metadata": object{"name": nameOf(n)},
		"spec":     object{"clusterIP": vip(n).Addr().String(), "ports": []object{{"port": 80, "protocol": "TCP"}}},
	}
}

func slice(n int, addrs []netip.Addr) object {
	list := make([]object, len(addrs))
	for i, a := range addrs {
		list[i] = object{"addresses": []string{a.String()}, "nodeName": nodeName, "conditions": object{"ready": true, "serving": true, "terminating": false}}
	}
	return object{
		"metadata":    object{"name": nameOf(n), "labels": object{"kubernetes.io/service-name": nameOf(n)}},
		"addressType": "IPv4", "ports": []object{{"name": "", "port": serverPort, "protocol": "TCP"}}, "endpoints": list,
	}
}

func (b *bench) add(ctx context.Context, n int, addrs []netip.Addr) error {
	return errors.Join(b.api.Do(ctx, http.MethodPost, services, service(n), nil), b.api.Do(ctx, http.MethodPost, slicesOf, slice(n, addrs), nil))
}

// put gives a Service its one endpoint, making the Service at first.
func (b *bench) put(ctx context.Context, n int, a netip.Addr) error {
	err := b.api.Do(ctx, http.MethodPut, slicesOf+"/"+nameOf(n), slice(n, []netip.Addr{a}), nil)
	var status *kube.StatusError
	if !errors.As(err, &status) || status.Code != http.StatusNotFound {
		return err
	}
	return b.add(ctx, n, []netip.Addr{a})
}

// fill makes n Services whose endpoints are nobody's.
func (b *bench) fill(ctx context.Context, n int) error {
	var likes []kube.Like
	for i := range n {
		addrs := make([]netip.Addr, b.Endpoints)
		for j := range addrs {
			k := i*b.Endpoints + j
			addrs[j] = netip.AddrFrom4([4]byte{172, 16 + byte(k>>16), byte(k >> 8), byte(k)})
		}
		likes = append(likes, kube.Like{Name: nameOf(i + 1), ClusterIP: vip(i + 1).Addr(), Endpoints: addrs})
	}
	if n == 0 {
		return nil
	}
	if err := b.add(ctx, 1, likes[0].Endpoints); err != nil {
		return err
	}
	return b.api.Fill(ctx, likes[0].Name, likes[1:])
}

// each does fn for all numbers below n, several at once.
func each(n int, fn func(int) error) error {
	work := make(chan int)
	var wg sync.WaitGroup
	errs := make([]error, writers)
	for i := range writers {
		wg.Go(func() {
			for n := range work {
				if errs[i] == nil {
					errs[i] = fn(n)
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	return errors.Join(errs...)
}

// watcher is a bare watch of the measured slice.
type watcher struct {
	stop context.CancelFunc
	done chan struct{}
	mu   sync.Mutex
	wait chan float64
	from time.Time
}

func (b *bench) watch(ctx context.Context) (*watcher, error) {
	ctx, cancel := context.WithCancel(ctx)
	body, err := b.api.Stream(ctx, slicesOf+"?watch=1&fieldSelector=metadata.name%3D"+nameOf(measured))
	if err != nil {
		cancel()
		return nil, err
	}
	w := &watcher{stop: cancel, done: make(chan struct{})}
	ready := make(chan struct{})
	go func() {
		defer close(w.done)
		defer body.Close()
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, 1<<20)
		for first := true; lines.Scan(); first = false {
			now := time.Now()
			if first { // what there is
				close(ready)
				continue
			}
			var event struct{ Type string }
			if json.Unmarshal(lines.Bytes(), &event) != nil || event.Type != "MODIFIED" {
				continue
			}
			w.mu.Lock()
			if w.wait != nil {
				w.wait <- float64(now.Sub(w.from).Microseconds()) / 1000
				w.wait = nil
			}
			w.mu.Unlock()
		}
	}()
	select {
	case <-ready:
		return w, nil
	case <-w.done:
		return nil, errors.New("the watch of the measured slice ended at once")
	}
}

// next receives the milliseconds from start to the next event.
func (w *watcher) next(start time.Time) <-chan float64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.from, w.wait = start, make(chan float64, 1)
	return w.wait
}

// told waits for what next receives.
func (w *watcher) told(heard <-chan float64) (float64, error) {
	select {
	case at := <-heard:
		return at, nil
	case <-w.done:
		return 0, errors.New("the watch of the measured slice ended")
	}
}

func (w *watcher) close() {
	w.stop()
	<-w.done
}
