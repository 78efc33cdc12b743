// SPDX-License-Identifier: Apache-2.0

package engine

import "testing"

// What leaves by the NIC meets a program from the moment on at which it may be an
// answer that has to be turned back, and stays so while there are such flows.
func TestWhatLeavesMeetsAProgramOnlyWhereItMust(t *testing.T) {
	devices := []string{"w0", "w1"}
	turns := func(w *edgeWorld, want int, when string) {
		t.Helper()
		w.must(func(e *Engine) error {
			list, err := e.dp.Turns()
			if len(list) != want {
				t.Errorf("%s: %d devices, want %d", when, len(list), want)
			}
			return err
		})
	}
	set := func(w *edgeWorld) {
		t.Helper()
		w.must(func(e *Engine) error { return e.SetEdge(Edge{Devices: devices, Host: true}) })
	}
	t.Run("the node itself", func(t *testing.T) {
		w := newEdgeWorld(t)
		turns(w, 0, "without Services")
		w.replace([]string{"*10.9.0.2:8080", "198.51.101.9:8080"}, []string{"*[fd09::2]:8080"}, nil)
		turns(w, 0, "pods here and elsewhere")
		w.replace([]string{"*198.51.100.1:8081"}, []string{"*[fd09::2]:8080"}, nil)
		turns(w, 2, "the node itself")
		w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil)
		turns(w, 2, "the node itself no more")
		set(w)
		turns(w, 0, "an edge set anew, without a flow")
		w.replace([]string{"*198.51.100.1:8081"}, []string{"*[fd09::2]:8080"}, nil)
		w.serve(w.home, "node", 8081)
		if name, _, err := ask(w.client, "tcp", externals[false][0]); err != nil || name != "node" {
			t.Errorf("%q, %v", name, err)
		}
		w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, nil)
		set(w)
		turns(w, 2, "an edge set anew, after a flow")
		w.must(func(e *Engine) error { return e.SetEdge(Edge{}) })
		turns(w, 0, "no edge")
	})
	t.Run("policy Local", func(t *testing.T) {
		w := newEdgeWorld(t)
		w.replace([]string{"*10.9.0.2:8080"}, []string{"*[fd09::2]:8080"}, local)
		turns(w, 2, "the client's address is kept")
		devices = devices[:1]
		set(w)
		turns(w, 1, "of one device")
		devices = devices[:2]
		set(w)
		turns(w, 2, "of both again")
	})
	t.Run("a child of the NIC", func(t *testing.T) {
		w := newEdgeWorld(t)
		w.childPod()
		turns(w, 2, "a pod with a child of the NIC")
	})
}
