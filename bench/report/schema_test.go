// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// schema is as much of JSON schema as docs/bench-schema.json uses for its fields.
type schema struct {
	Properties map[string]schema
	Items      *schema
	Ref        string            `json:"$ref"`
	Defs       map[string]schema `json:"$defs"`
}

func TestSchemaHasTheFieldsOfTheDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/bench-schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var root schema
	if err := json.Unmarshal(text, &root); err != nil {
		t.Fatal(err)
	}
	seen := map[reflect.Type]bool{}
	var compare func(path string, s schema, r reflect.Type)
	compare = func(path string, s schema, r reflect.Type) {
		if s.Ref != "" {
			s = root.Defs[strings.TrimPrefix(s.Ref, "#/$defs/")]
		}
		for r.Kind() == reflect.Pointer {
			r = r.Elem()
		}
		if s.Items != nil && r.Kind() == reflect.Slice {
			compare(path+"[]", *s.Items, r.Elem())
		}
		if s.Properties == nil || r.Kind() != reflect.Struct || seen[r] {
			return
		}
		seen[r] = true
		fields := map[string]reflect.Type{}
		for _, f := range reflect.VisibleFields(r) { // of what is embedded, too
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
				fields[name] = f.Type
			}
		}
		if d := cmp.Diff(slices.Sorted(maps.Keys(s.Properties)), slices.Sorted(maps.Keys(fields))); d != "" {
			t.Errorf("%s: the schema (-) and what is written (+) differ:\n%s", path, d)
		}
		for name, sub := range s.Properties {
			if f, ok := fields[name]; ok {
				compare(path+"."+name, sub, f)
			}
		}
	}
	compare("document", root, reflect.TypeFor[Document]())
}
