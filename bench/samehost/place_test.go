// SPDX-License-Identifier: Apache-2.0

package samehost

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mustang-net/mustang/bench/report"
)

func TestTestedRulesStandWhereTheirPositionSays(t *testing.T) {
	rule := func(ip string) string { return "-A KUBE-SERVICES -d " + ip + "/32 -p tcp -j KUBE-SVC-" + ip + "\n" }
	end := "-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n"
	saved := "*nat\n:KUBE-SERVICES - [1:60]\n-A PREROUTING -j KUBE-SERVICES\n" +
		rule("10.0.0.9") + rule("10.0.0.1") + rule("10.0.0.2") + rule("10.0.0.3") + rule("10.0.0.8") + rule("10.0.0.4") + end + "COMMIT\n"
	tested := []testedService{
		{vip: netip.MustParseAddrPort("10.0.0.8:80"), position: report.Middle},
		{vip: netip.MustParseAddrPort("10.0.0.9:80"), position: report.Last},
	}
	got, err := placed([]byte(saved), tested)
	if err != nil {
		t.Fatal(err)
	}
	want := "*nat\n:KUBE-SERVICES - [0:0]\n" + rule("10.0.0.1") + rule("10.0.0.2") + rule("10.0.0.8") + rule("10.0.0.3") + rule("10.0.0.4") +
		rule("10.0.0.9") + end + "COMMIT\n"
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("the list differs:\n%s", diff)
	}
	if _, err := placed([]byte(strings.ReplaceAll(saved, rule("10.0.0.8"), "")), tested); err == nil || !strings.Contains(err.Error(), "10.0.0.8:80") {
		t.Errorf("a rule that is not there is not named: %v", err)
	}
}
