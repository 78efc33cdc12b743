// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// Where a stranger reaches nobody, all checks that policy denies pass: others say that it is not
// policy's doing.
func TestAStrangerWhoReachesNobodyIsNotDeniedByPolicy(t *testing.T) {
	pods := map[string]*corev1.Pod{}
	names := map[string]string{}
	for i, name := range []string{"client", "stranger", "server-here", "server-there"} {
		ip := fmt.Sprintf("10.1.0.%d", i+1)
		pods[name] = &corev1.Pod{Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: ip}}}}
		names[ip] = name
	}
	for _, cut := range []bool{false, true} {
		failed := map[string]int{}
		c := &test{world: &world{pods: pods}, ctx: t.Context(), done: func(k Check) {
			if k.Failed != "" {
				_, what, _ := strings.Cut(k.What, ", ")
				failed[what]++
			}
		}}
		c.exec = func(_ context.Context, pod string, args ...string) ([]byte, error) {
			ip, _, _ := strings.Cut(args[len(args)-1], ":")
			if pod == "stranger" && cut && !slices.Contains(args, "--in-vain") {
				return nil, errors.New("timeout")
			}
			return fmt.Appendf(nil, `{"server": %q, "client": %q}`, names[ip], c.ip(pod, true)), nil
		}
		c.eachFamily(c.unguarded)
		if cut {
			c.eachFamily(c.policy)
		}
		want := map[bool]int{true: 4}[cut]
		if failed["no policy yet"] != want || len(failed) > 1 {
			t.Errorf("cut off: %v; failed: %v", cut, failed)
		}
	}
}
