// SPDX-License-Identifier: Apache-2.0

package agent_test

// An API server that was filled past its front door, as the bench does, is like one that has
// had each request.

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/test/kube"
)

type anything = map[string]any

const addressesPath = "/apis/networking.k8s.io/v1/ipaddresses"

// post makes a Service and its slice by requests.
func (w *world) post(ctx context.Context, l kube.Like) error {
	var endpoints []anything
	for _, a := range l.Endpoints {
		endpoints = append(endpoints, anything{"addresses": []string{a.String()}, "nodeName": nodeName, "conditions": anything{"ready": true}})
	}
	service := anything{"metadata": anything{"name": l.Name}, "spec": anything{"clusterIP": l.ClusterIP.String(), "ports": []anything{{"port": 80, "targetPort": 8080}}}}
	slice := anything{"metadata": anything{"name": l.Name, "labels": anything{"kubernetes.io/service-name": l.Name}}, "addressType": "IPv4",
		"ports": []anything{{"name": "", "port": 8080}}, "endpoints": endpoints}
	if err := w.api.Do(ctx, http.MethodPost, kube.ServicesPath, service, nil); err != nil {
		return err
	}
	return w.api.Do(ctx, http.MethodPost, kube.SlicesPath, slice, nil)
}

// kept is what the API server gives out of a Service, with what is its own erased.
func (w *world) kept(ctx context.Context, l kube.Like) (objects []anything) {
	w.t.Helper()
	for _, path := range []string{kube.ServicesPath + "/" + l.Name, kube.SlicesPath + "/" + l.Name, addressesPath + "/" + l.ClusterIP.String()} {
		var text json.RawMessage
		must(w.t, w.api.Do(ctx, http.MethodGet, path, nil, &text))
		var o anything
		must(w.t, json.Unmarshal(bytes.ReplaceAll(bytes.ReplaceAll(text, []byte(`"`+l.Name+`"`), []byte(`"NAME"`)), []byte(`"`+l.ClusterIP.String()+`"`), []byte(`"IP"`)), &o))
		meta := o["metadata"].(anything)
		if _, err := time.Parse(time.RFC3339, meta["creationTimestamp"].(string)); err != nil || len(meta["uid"].(string)) != 36 {
			w.t.Errorf("%s: %v", path, meta)
		}
		for _, its := range []string{"creationTimestamp", "uid", "resourceVersion"} {
			delete(meta, its)
		}
		for _, f := range meta["managedFields"].([]any) {
			delete(f.(anything), "time")
		}
		objects = append(objects, o)
	}
	return objects
}

func TestFilledServicesAreAsPosted(t *testing.T) {
	w := newNode(t)
	ctx := t.Context()
	service := func(i int) kube.Like {
		return kube.Like{Name: fmt.Sprintf("f%d", i), ClusterIP: netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}),
			Endpoints: []netip.Addr{netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)}), netip.AddrFrom4([4]byte{172, 17, byte(i >> 8), byte(i)})}}
	}
	must(t, w.post(ctx, service(1)))
	var likes []kube.Like
	for i := 2; i <= 300; i++ {
		likes = append(likes, service(i))
	}
	must(t, w.api.Fill(ctx, "f1", likes))
	posted := service(301)
	posted.Endpoints = likes[150].Endpoints
	must(t, w.post(ctx, posted))
	if diff := cmp.Diff(w.kept(ctx, posted), w.kept(ctx, likes[150])); diff != "" {
		t.Errorf("a filled Service is not as a posted one (-posted +filled):\n%s", diff)
	}
	// Their addresses are taken, and are free again without them.
	taken := service(302)
	taken.ClusterIP = likes[7].ClusterIP
	if err := w.post(ctx, taken); err == nil || !strings.Contains(err.Error(), "already allocated") {
		t.Errorf("a second Service got a filled one's address: %v", err)
	}
	must(t, w.api.Do(ctx, http.MethodDelete, kube.ServicesPath+"/"+likes[7].Name, nil, nil))
	must(t, w.post(ctx, taken))
	// And the API server's own check of them has had nothing to mend. It follows Services and
	// addresses by two watches: of those that come or go by requests it may hear in the wrong order.
	filled := map[string]bool{}
	for _, l := range likes {
		filled[l.Name] = l.Name != likes[7].Name
	}
	var events struct {
		Items []struct {
			Reason, Message string
			InvolvedObject  struct{ Name string }
		}
	}
	must(t, w.api.Do(ctx, http.MethodGet, "/api/v1/namespaces/default/events", nil, &events))
	for _, e := range events.Items {
		if filled[e.InvolvedObject.Name] {
			t.Errorf("event %s of %s: %s", e.Reason, e.InvolvedObject.Name, e.Message)
		}
	}
	if err := w.api.Fill(ctx, "nobody", likes[:1]); err == nil || !strings.Contains(err.Error(), "nobody from etcd: it is not there") {
		t.Errorf("a pattern that is not there: %v", err)
	}
}

// TestBenchBesideTheRealKubeProxy measures Services of kube-proxy by iptables-legacy: filled,
// in force, in their places, and answering.
func TestBenchBesideTheRealKubeProxy(t *testing.T) {
	if testing.Short() {
		t.Skip("an API server, kube-proxy and a bench take minutes: not in short mode")
	}
	if missing, err := kube.MissingAPIServer(); err != nil || missing != "" {
		t.Skipf("not built yet: %s (%v); to build: test/kube/kube build", missing, err)
	}
	file := filepath.Join(t.TempDir(), "out.json")
	for end := time.Now().Add(10 * time.Minute); ; time.Sleep(time.Second) {
		out, err := exec.CommandContext(t.Context(), tool, "bench", "samehost", "--modes", "veth", "--services-by", "kube-proxy-iptables-legacy",
			"--services", "300", "--rounds", "1", "--duration", "60ms", "--turns", "4", "--stream-by", "own", "--json", file).CombinedOutput()
		if err == nil {
			break
		}
		if !strings.Contains(string(out), "another bench runs") || time.Now().After(end) {
			t.Fatalf("%v: %s", err, out)
		}
	}
	var doc struct {
		Subjects []struct{ ID, Backend string }
		Samples  []struct {
			Subject, Scenario, Error string
			Rate                     float64
		}
	}
	text, err := os.ReadFile(file)
	must(t, err)
	must(t, json.Unmarshal(text, &doc))
	want := map[string]bool{"pod IP": true, "ClusterIP, middle rule": true, "ClusterIP, last rule": true}
	for _, s := range doc.Subjects {
		if name, ours := strings.CutPrefix(s.ID, "veth kube-proxy-iptables-legacy (300 Services), "); ours {
			if !want[name] || !strings.HasPrefix(s.Backend, "kube-proxy v") || !strings.HasSuffix(s.Backend, "(legacy)") {
				t.Errorf("%+v", s)
			}
		}
	}
	for _, s := range doc.Samples {
		if name, ours := strings.CutPrefix(s.Subject, "veth kube-proxy-iptables-legacy (300 Services), "); ours && s.Scenario == "crr" && s.Error == "" && s.Rate > 0 {
			delete(want, name)
		}
	}
	if len(want) > 0 {
		t.Errorf("not measured: %v", want)
	}
}
