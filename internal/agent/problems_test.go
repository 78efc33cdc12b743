// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/mustang-net/mustang/internal/k8s"
	"github.com/mustang-net/mustang/internal/service"
)

// Who names very many addresses that are another's fills neither the log nor what health tells.
func TestVeryManyProblemsOfOneObject(t *testing.T) {
	var log bytes.Buffer
	p := newProblems(slog.New(slog.NewTextHandler(&log, nil)), func(object) string { return "" }, func(context.Context, k8s.Kind, k8s.Key, string, string) error { return nil })
	var list []service.Problem
	key := k8s.Key{Namespace: "shop", Name: "greedy"}
	for i := range 20000 {
		list = append(list, service.Problem{Service: idOf(key), Err: fmt.Errorf("address %d is another's", i)})
	}
	for range 2 {
		p.faults(list)
		told := p.list()[serviceAt(key)]
		if len(told) != 26 || told[0] != "address 0 is another's" || told[25] != "and 19975 more problems" {
			t.Errorf("told are %d problems: %q", len(told), told)
		}
		if n := strings.Count(log.String(), "\n"); n != 26 {
			t.Errorf("the log has %d lines", n)
		}
	}
	p.faults(nil)
	if told := p.list(); len(told) != 0 {
		t.Errorf("all is well, and told is %q", told)
	}
}
