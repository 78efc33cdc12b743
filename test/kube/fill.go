// SPDX-License-Identifier: Apache-2.0

// This file fills an API server with many Services, past its front door: what one object
// looks like in etcd is the API server's own work, the others are written beside it.

package kube

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// Where the API server takes Services and their slices, of the namespace that Fill fills.
const (
	ServicesPath = "/api/v1/namespaces/default/services"
	SlicesPath   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

// And where it keeps them in etcd.
const (
	servicesKey  = "/registry/services/specs/default/"
	slicesKey    = "/registry/endpointslices/default/"
	addressesKey = "/registry/ipaddresses/" // its record of whose a cluster IP is
)

// Like is a Service that is like another one.
type Like struct {
	Name      string
	ClusterIP netip.Addr
	Endpoints []netip.Addr
}

// Fill makes Services with a slice each like the one of the pattern's name, which the API
// server has made: they are what it would have made of theirs, but come in seconds, where
// 100,000 requests of each kind take a quarter of an hour. When it returns without an error
// the API server lists as many more, and gives out a sample of them as it was asked for.
//
// Who follows the API server is started after it: a watch that is cut short goes on behind
// the last revision that it has seen, and some objects share one.
func (s *APIServer) Fill(ctx context.Context, pattern string, likes []Like) error {
	if len(likes) == 0 {
		return nil
	}
	if err := s.fill(ctx, pattern, likes); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = fmt.Errorf("%w (%w)", err, cause)
		}
		return fmt.Errorf("fill the API server with %d Services like %s: %w", len(likes), pattern, err)
	}
	return nil
}

const (
	// fillBatch is how many Services are written at once: the API server removes an
	// address whose Service does not come within a minute.
	fillBatch = 2000
	// etcdBatch is how many keys are, of the 128 that a transaction may have.
	etcdBatch = 120
)

func (s *APIServer) fill(ctx context.Context, pattern string, likes []Like) error {
	e := etcd{http.Client{Transport: &http.Transport{DialContext: s.dial}, Timeout: time.Minute}}
	defer e.CloseIdleConnections()
	p, err := e.pattern(ctx, pattern)
	if err != nil {
		return err
	}
	counts := func() (n [2]int, err error) {
		for i, path := range []string{ServicesPath, SlicesPath} {
			if n[i], err = s.listed(ctx, path); err != nil {
				return n, err
			}
		}
		return n, nil
	}
	before, err := counts()
	if err != nil {
		return err
	}
	done := 0
	for batch := range slices.Chunk(likes, fillBatch) {
		if err := s.fillSome(ctx, e, p, batch); err != nil {
			return fmt.Errorf("%d of them are there: %w", done, err)
		}
		done += len(batch)
	}
	after, err := counts()
	if err != nil {
		return err
	}
	for i, what := range []string{"Services", "slices"} {
		if more := after[i] - before[i]; more < len(likes) { // it makes one of its own
			return fmt.Errorf("the API server lists only %d more %s than before, of %d", more, what, len(likes))
		}
	}
	return s.sampled(ctx, likes)
}

// fillSome writes addresses first, as a request for a Service does: the API server is to know
// of them when it sees the Services, else it thinks that it has forgotten them.
func (s *APIServer) fillSome(ctx context.Context, e etcd, p *pattern, likes []Like) error {
	var addresses, services, endpoints []put
	for _, l := range likes {
		made, err := p.like(l)
		if err != nil {
			return err
		}
		addresses, services, endpoints = append(addresses, made[0]), append(services, made[1]), append(endpoints, made[2])
	}
	revision, err := e.put(ctx, addresses)
	if err != nil {
		return err
	}
	heard := "/apis/networking.k8s.io/v1/ipaddresses/" + likes[0].ClusterIP.String() + "?resourceVersion=" + strconv.FormatInt(revision, 10)
	err = poll(ctx, "wait until the API server has heard of the addresses", 10*time.Millisecond, func(ctx context.Context) error {
		return s.Do(ctx, http.MethodGet, heard, nil, nil)
	})
	if err != nil {
		return err
	}
	if _, err := e.put(ctx, services); err != nil {
		return err
	}
	_, err = e.put(ctx, endpoints)
	return err
}

// put is a key of etcd and its value.
type put struct{ key, value []byte }

// kept is an object in the form in which the API server keeps it.
type kept[T message] struct {
	envelope runtime.Unknown
	object   T
}

type message interface {
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
	metav1.Object
}

// magic begins every value that is kept as protobuf.
var magic = []byte("k8s\x00")

func (k *kept[T]) decode(value []byte) error {
	raw, ok := bytes.CutPrefix(value, magic)
	if !ok {
		return fmt.Errorf("etcd's value is no protobuf of Kubernetes: %.20q", value)
	}
	if err := k.envelope.Unmarshal(raw); err != nil {
		return err
	}
	return k.object.Unmarshal(k.envelope.Raw)
}

// newUID is a random one (RFC 9562, version 4).
func newUID() types.UID {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
}

// encode returns the object as a new one of this name.
func (k *kept[T]) encode(name string) ([]byte, error) {
	now := metav1.Now()
	k.object.SetName(name)
	k.object.SetUID(newUID())
	k.object.SetCreationTimestamp(now)
	fields := k.object.GetManagedFields()
	for i := range fields {
		fields[i].Time = &now
	}
	k.object.SetManagedFields(fields)
	var err error
	if k.envelope.Raw, err = k.object.Marshal(); err != nil {
		return nil, err
	}
	raw, err := k.envelope.Marshal()
	return append(slices.Clone(magic), raw...), err
}

// pattern is a Service as the API server keeps it: three objects.
type pattern struct {
	service kept[*corev1.Service]
	slice   kept[*discoveryv1.EndpointSlice]
	address kept[*networkingv1.IPAddress]
	// endpoint is one of the slice's.
	endpoint discoveryv1.Endpoint
}

func (e etcd) pattern(ctx context.Context, name string) (*pattern, error) {
	p := &pattern{}
	p.service.object, p.slice.object, p.address.object = &corev1.Service{}, &discoveryv1.EndpointSlice{}, &networkingv1.IPAddress{}
	get := func(key string, decode func([]byte) error) error {
		value, err := e.get(ctx, key)
		if err == nil {
			err = decode(value)
		}
		if err != nil {
			return fmt.Errorf("read %s from etcd: %w", key, err)
		}
		return nil
	}
	if err := errors.Join(get(servicesKey+name, p.service.decode), get(slicesKey+name, p.slice.decode)); err != nil {
		return nil, err
	}
	if err := get(addressesKey+p.service.object.Spec.ClusterIP, p.address.decode); err != nil {
		return nil, err
	}
	if len(p.service.object.Spec.ClusterIPs) != 1 || len(p.slice.object.Endpoints) == 0 {
		return nil, fmt.Errorf("Service %s is no pattern: it has cluster IPs %v, and %d endpoints", name, p.service.object.Spec.ClusterIPs, len(p.slice.object.Endpoints))
	}
	p.endpoint = p.slice.object.Endpoints[0]
	return p, nil
}

// like returns what the API server would keep of a Service, the address first.
func (p *pattern) like(l Like) ([]put, error) {
	ip := l.ClusterIP.String()
	spec := &p.service.object.Spec
	spec.ClusterIP, spec.ClusterIPs = ip, []string{ip}
	service, err := p.service.encode(l.Name)
	if err != nil {
		return nil, err
	}
	p.slice.object.Labels[discoveryv1.LabelServiceName] = l.Name
	p.slice.object.Endpoints = nil
	for _, a := range l.Endpoints {
		p.endpoint.Addresses = []string{a.String()}
		p.slice.object.Endpoints = append(p.slice.object.Endpoints, p.endpoint)
	}
	slice, err := p.slice.encode(l.Name)
	if err != nil {
		return nil, err
	}
	p.address.object.Spec.ParentRef.Name = l.Name
	address, err := p.address.encode(ip)
	if err != nil {
		return nil, err
	}
	return []put{{[]byte(addressesKey + ip), address}, {[]byte(servicesKey + l.Name), service}, {[]byte(slicesKey + l.Name), slice}}, nil
}

// listed is how many objects the API server lists at a path.
func (s *APIServer) listed(ctx context.Context, path string) (int, error) {
	var page struct {
		Metadata struct{ RemainingItemCount int }
		Items    []struct{}
	}
	err := s.Do(ctx, http.MethodGet, path+"?limit=1", nil, &page)
	return len(page.Items) + page.Metadata.RemainingItemCount, err
}

// sampled asks the API server for the first, the middle and the last one.
func (s *APIServer) sampled(ctx context.Context, likes []Like) error {
	for _, i := range []int{0, len(likes) / 2, len(likes) - 1} {
		l := likes[i]
		var service corev1.Service
		var slice discoveryv1.EndpointSlice
		if err := s.Do(ctx, http.MethodGet, ServicesPath+"/"+l.Name, nil, &service); err != nil {
			return err
		}
		if err := s.Do(ctx, http.MethodGet, SlicesPath+"/"+l.Name, nil, &slice); err != nil {
			return err
		}
		var addresses []string
		for _, e := range slice.Endpoints {
			addresses = append(addresses, e.Addresses...)
		}
		if service.Spec.ClusterIP != l.ClusterIP.String() || !slices.EqualFunc(addresses, l.Endpoints, func(s string, a netip.Addr) bool { return s == a.String() }) {
			return fmt.Errorf("the API server has %s at %s with endpoints %v, not as it was written: at %s with %v", l.Name, service.Spec.ClusterIP, addresses, l.ClusterIP, l.Endpoints)
		}
	}
	return nil
}

// etcd is spoken to in JSON.
type etcd struct{ http.Client }

func (e *etcd) get(ctx context.Context, key string) ([]byte, error) {
	var out struct {
		KVs []struct{ Value []byte }
	}
	if err := e.call(ctx, "range", map[string]any{"key": []byte(key)}, &out); err != nil {
		return nil, err
	}
	if len(out.KVs) != 1 {
		return nil, errors.New("it is not there")
	}
	return out.KVs[0].Value, nil
}

// put writes objects of a kind in transactions, which take a tenth of the time of requests for
// each, and returns the last revision. Objects of a transaction share one, and the API server
// takes itself to be up to date when it has seen one of them: so the last object comes alone.
func (e *etcd) put(ctx context.Context, puts []put) (revision int64, err error) {
	last := len(puts) - 1
	for _, batch := range append(slices.Collect(slices.Chunk(puts[:last], etcdBatch)), puts[last:]) {
		var ops []any
		for _, p := range batch {
			ops = append(ops, map[string]any{"request_put": map[string][]byte{"key": p.key, "value": p.value}})
		}
		var out struct {
			Header struct {
				Revision int64 `json:",string"`
			}
		}
		if err := e.call(ctx, "txn", map[string]any{"success": ops}, &out); err != nil {
			return 0, fmt.Errorf("write %s to etcd: %w", batch[0].key, err)
		}
		revision = out.Header.Revision
	}
	return revision, nil
}

func (e *etcd) call(ctx context.Context, method string, in, out any) error {
	text, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, etcdURL+"/v3/kv/"+method, bytes.NewReader(text))
	if err != nil {
		return err
	}
	resp, err := e.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd's %s: %s: %s", method, resp.Status, tail(text, 500))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}
