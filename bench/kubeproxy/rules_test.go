// SPDX-License-Identifier: Apache-2.0

package kubeproxy

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mustang-net/mustang/lab"
)

func TestKubeProxyHasSyncedWhenItsFamilyIs(t *testing.T) {
	const p = "kubeproxy_sync_proxy_rules_"
	lines := func(service, endpoint, queued, last string) string {
		return "# TYPE x gauge\n" + p + "service_changes_pending " + service + "\n" + p + "endpoint_changes_pending " + endpoint + "\n" +
			p + `last_queued_timestamp_seconds{ip_family="IPv4"} ` + queued + "\n" + p + `last_queued_timestamp_seconds{ip_family="IPv6"} 1` + "\n" +
			p + `last_timestamp_seconds{ip_family="IPv4"} ` + last + "\n"
	}
	for _, c := range []struct {
		name, metrics string
		v6, want      bool
	}{
		{"all is written", lines("0", "0", "1.7633e+09", "1.7633002e+09"), false, true},
		{"a Service waits", lines("1", "0", "1.7633e+09", "1.7633002e+09"), false, false},
		{"endpoints wait", lines("0", "2", "1.7633e+09", "1.7633002e+09"), false, false},
		{"asked for again since", lines("0", "0", "1.7633004e+09", "1.7633002e+09"), false, false},
		{"the other family was never written", lines("0", "0", "1.7633e+09", "1.7633002e+09"), true, false},
		{"no metrics", "", false, false},
	} {
		if err := synced(c.metrics, c.v6); (err == nil) != c.want {
			t.Errorf("%s: %v, want synced: %v", c.name, err, c.want)
		}
	}
	if err := synced(lines("0", "2", "1.7633e+09", "1.7633002e+09"), true); !errors.Is(err, errNothing) {
		t.Errorf("before the first rules of its family: %v", err)
	}
}

func TestFrontendsOfKubeProxysRules(t *testing.T) {
	got := frontends([]byte(`*nat
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -d 10.97.0.1/32 -p tcp -m comment --comment "default/s0:tcp cluster IP" -m tcp --dport 5201 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -d fd00:10:96::1:1/128 -p udp -m udp --dport 53 -j KUBE-SVC-BBBBBBBBBBBBBBBB
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-AAAAAAAAAAAAAAAA -d 10.97.0.9/32 -p tcp -m tcp --dport 1 -j KUBE-MARK-MASQ
COMMIT
		elements = { 10.97.0.2 . tcp . 5201 : goto service-ABC-default/s1/tcp/tcp, 10.97.0.3 . tcp . 5201 comment "x" : goto service-DEF,
			     fd00:10:96::1:2 . tcp . 5201 : goto service-GHI }
`))
	want := map[string]bool{"10.97.0.1:5201/tcp": true, "[fd00:10:96::1:1]:53/udp": true, "10.97.0.2:5201/tcp": true,
		"10.97.0.3:5201/tcp": true, "[fd00:10:96::1:2]:5201/tcp": true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("frontends differ:\n%s", diff)
	}
	services := []lab.Service{{VIP: netip.MustParseAddr("10.97.0.1"), Port: 5201, Protocol: "tcp"}, {VIP: netip.MustParseAddr("10.97.0.9"), Port: 5201, Protocol: "tcp"}}
	if err := missing(services[:1], got); err != nil {
		t.Errorf("nothing is missing: %v", err)
	}
	if err := missing(services, got); err == nil || !strings.Contains(err.Error(), "1 of 2") || !strings.Contains(err.Error(), "10.97.0.9:5201/tcp") {
		t.Errorf("the error does not name what is missing: %v", err)
	}
}
