// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"encoding/json"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/mustang-net/mustang/internal/engine"
	"github.com/mustang-net/mustang/internal/ipam"
	"github.com/mustang-net/mustang/internal/link"
)

// schema is as much of JSON schema as docs/cni.schema.json uses.
type schema struct {
	Properties map[string]schema
	Enum       []any
	Default    any
	OneOf      []schema
	Items      *schema
	Examples   []json.RawMessage
}

func readSchema(t *testing.T) schema {
	t.Helper()
	text, err := os.ReadFile("../../docs/cni.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s schema
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func jsonFields(t reflect.Type) (out []string) {
	for i := range t.NumField() {
		if name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ","); name != "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

func TestSchemaHasTheFieldsOfTheConfiguration(t *testing.T) {
	s := readSchema(t)
	pool := s.Properties["ipam"].Properties["pools"].Items.OneOf[1]
	for name, x := range map[string]struct {
		schema map[string]schema
		fields []string
	}{
		"configuration": {s.Properties, jsonFields(reflect.TypeFor[Config]())},
		"ipam":          {s.Properties["ipam"].Properties, jsonFields(reflect.TypeFor[IPAM]())},
		"pool":          {pool.Properties, jsonFields(reflect.TypeFor[ipam.Pool]())},
	} {
		if d := cmp.Diff(slices.Sorted(maps.Keys(x.schema)), x.fields); d != "" {
			t.Errorf("%s: the schema (-) and the Go struct (+) differ:\n%s", name, d)
		}
	}
}

// Each field is read, and into its own place.
func TestParseKnowsTheFieldsOfTheConfiguration(t *testing.T) {
	c := &Config{}
	places := c.fields()
	delete(places, "cni.dev/attachments") // read by nobody
	if d := cmp.Diff(jsonFields(reflect.TypeFor[Config]()), slices.Sorted(maps.Keys(places))); d != "" {
		t.Fatalf("what is read (+) is not what the struct has (-):\n%s", d)
	}
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if name != "" && places[name] != v.Field(i).Addr().Interface() {
			t.Errorf("%s goes to another field", name)
		}
	}
}

func TestSchemaHasTheValuesAndDefaultsOfTheCode(t *testing.T) {
	s := readSchema(t)
	var modes, vs []any
	for _, m := range append(slices.Clone(link.Modes), Chained) {
		modes = append(modes, m)
	}
	for _, v := range versions {
		vs = append(vs, v)
	}
	for field, want := range map[string][]any{"mode": modes, "cniVersion": vs} {
		if d := cmp.Diff(s.Properties[field].Enum, want); d != "" {
			t.Errorf("%s:\n%s", field, d)
		}
	}
	for field, want := range map[string]any{"mode": link.Veth, "bridge": link.DefaultBridge, "bpffs": engine.DefaultBPFFS, "stateDir": engine.DefaultStateDir, "servicePath": "both"} {
		if got := s.Properties[field].Default; got != want {
			t.Errorf("%s: default %v, want %v", field, got, want)
		}
	}
	// Who compares a configuration with the agent's finds the defaults in it.
	c, err := Parse([]byte("{}"), nil)
	if err != nil || c.BPFFS != engine.DefaultBPFFS || c.StateDir != engine.DefaultStateDir {
		t.Errorf("without a word: %q, %q, %v", c.BPFFS, c.StateDir, err)
	}
}

func TestExamplesAreValidAndHaveNoUnknownFields(t *testing.T) {
	s := readSchema(t)
	if len(s.Examples) == 0 {
		t.Error("no examples")
	}
	for _, text := range s.Examples {
		c, err := Parse(text, func(field string) { t.Errorf("unknown field %s in %s", field, text) })
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestUnknownFieldsAreTold(t *testing.T) {
	for text, want := range map[string][]string{
		`{"mod": "veth", "ipam": {"type": "mustang", "pool": [], "pools": [{"subnet": "10.1.0.0/24", "gatway": "10.1.0.1"}]}}`: {"mod", "ipam.pool", "ipam.pools[0].gatway"},
		`{"ipam": {"type": "host-local", "ranges": []}}`:                                                                       nil, // that plugin's
	} {
		var got []string
		if _, err := Parse([]byte(text), func(field string) { got = append(got, field) }); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: told of %q, want %q", text, got, want)
		}
	}
}
