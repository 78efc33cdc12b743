// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// newEdgeTool is a node with a NIC, up0.
func newEdgeTool(t *testing.T) *tool {
	t.Helper()
	w := newTool(t)
	w.sh("ip -n %s link add up0 type veth peer name up1 && ip -n %s addr add 192.0.2.1/24 dev up0", w.netns, w.netns)
	return w
}

func (w *tool) edge() (v edgeView) {
	w.t.Helper()
	if err := json.Unmarshal([]byte(w.ok("edge", "show", "-o", "json")), &v); err != nil {
		w.t.Fatal(err)
	}
	return v
}

func TestAnEdgeThatCannotBeSetIsAsItWas(t *testing.T) {
	w := newEdgeTool(t)
	w.ok("edge", "set", "--dev", "up0", "--ports", "62000-62999")
	before := w.edge()
	w.sh("ip -n %s addr add 198.51.100.1/24 dev up1", w.netns)
	if _, errs, code := w.run("", "edge", "set", "--dev", "up0,up1", "--host", "--cgroup-root", "/not/cgroup2"); code != 1 || !strings.Contains(errs, "/not/cgroup2") {
		t.Errorf("status %d: %s", code, errs)
	}
	if now := w.edge(); !reflect.DeepEqual(now, before) {
		t.Errorf("the edge is %+v\nit was %+v", now, before)
	}
}

func TestPortsOfAnEdgeAreReadWhole(t *testing.T) {
	w := newEdgeTool(t)
	for _, ports := range []string{"61000-62000-63000", "61000-62000x", "+61000-62000", "61000-70000", "61000", "-", "61000 - 62000"} {
		if _, errs, code := w.run("", "edge", "set", "--dev", "up0", "--ports="+ports); code != 2 || !strings.Contains(errs, fmt.Sprintf("%q", ports)) {
			t.Errorf("%s: status %d: %s", ports, code, errs)
		}
	}
	w.ok("edge", "set", "--dev", "up0", "--ports", "61000-62000")
	if e := w.edge(); e.Ports != "61000-62000" {
		t.Errorf("%+v", e)
	}
}

func TestKilledEdgeChangesAreOldOrNew(t *testing.T) {
	w := newEdgeTool(t)
	w.ok("edge", "set", "--dev", "up0", "--host")
	w.ok("edge", "rm")
	w.killLoop(10*time.Second, []string{"edge", "set", "--dev", "up0", "--host"}, []string{"edge", "rm"}, func() bool {
		e := w.edge()
		there := slices.Equal(e.Devices, []string{"up0"})
		if len(e.Devices) > 0 != there || len(e.Addresses) > 0 != there || e.Host != there {
			t.Fatalf("neither old nor new: %+v", e)
		}
		return there
	})
}

func TestEndpointsAreRemovedAllOrNone(t *testing.T) {
	w := newTool(t)
	var ids []string
	w.pod(1)
	w.pod(2)
	left := func() (list []endpointView) {
		if err := json.Unmarshal([]byte(w.ok("ep", "ls", "-o", "json")), &list); err != nil {
			t.Fatal(err)
		}
		return list
	}
	for _, ep := range left() {
		ids = append(ids, fmt.Sprint(ep.ID))
	}
	if _, errs, code := w.run("", "ep", "rm", ids[0], "999"); code != 1 || !strings.Contains(errs, "endpoint 999") {
		t.Errorf("status %d: %s", code, errs)
	}
	if list := left(); len(list) != 2 {
		t.Errorf("what failed left %+v", list)
	}
	w.ok("ep", "rm", ids[0], ids[1], ids[0])
	if list := left(); len(list) != 0 {
		t.Errorf("%+v", list)
	}
}
