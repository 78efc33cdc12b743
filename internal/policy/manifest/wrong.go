// SPDX-License-Identifier: Apache-2.0

package manifest

// What cannot be read of a file, in the words of the file.

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// decode reads an object of a kind as an API server would: strictly, by JSON's types, so
// that a label 1 is no label "1". Before its document the file has so many lines.
func decode(kind string, doc []byte, before int, v any) error {
	text, err := yaml.YAMLToJSONStrict(doc)
	if err != nil {
		return unreadable(kind, doc, before, err)
	}
	unknown, err := kjson.UnmarshalStrict(text, v)
	if err != nil {
		if typed := json.Unmarshal(text, v); typed != nil { // says what is wrong by its parts
			err = typed
		}
		return unreadable(kind, doc, before, err)
	}
	if len(unknown) > 0 {
		return unreadable(kind, doc, before, unknown[0])
	}
	return nil
}

// unreadable is err of an object of a kind, with its name as far as that can be read. Before
// its document the file has so many lines.
func unreadable(kind string, doc []byte, before int, err error) error {
	var o struct {
		Metadata struct{ Namespace, Name string } `json:"metadata"`
	}
	_ = yaml.Unmarshal(doc, &o) // what else is wrong is in err
	what := kind
	if name := o.Metadata.Name; name != "" && o.Metadata.Namespace != "" {
		what += " " + o.Metadata.Namespace + "/" + name
	} else if name != "" {
		what += " " + name
	}
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		if field := strings.TrimPrefix(wrong.Field, "NetworkPolicy."); field != "" { // which is how Go calls what is embedded
			what += ": " + field
		}
		return fmt.Errorf("%s: %s", what, Misfit(wrong))
	}
	if unknown := (kjson.FieldError)(nil); errors.As(err, &unknown) {
		return fmt.Errorf("%s: unknown field %q; write it as the API has it, or leave it out", what, unknown.FieldPath())
	}
	return fmt.Errorf("%s: %s", what, yamlWords(err.Error(), before))
}

var lineOf = regexp.MustCompile(`(?m)^ *line [0-9]+`)

// yamlWords is an error of the reader of YAML, by the lines of the whole file.
func yamlWords(text string, before int) string {
	if _, after, ok := strings.Cut(text, "yaml: "); ok {
		text = strings.TrimPrefix(after, "unmarshal errors:\n")
	}
	text = lineOf.ReplaceAllStringFunc(text, func(line string) string {
		n, _ := strconv.Atoi(strings.TrimPrefix(strings.TrimSpace(line), "line ")) // digits, by the expression
		return fmt.Sprintf("line %d", before+n)
	})
	return strings.ReplaceAll(text, "\n", "; ")
}

// Misfit says in words what is there, and what belongs there.
func Misfit(wrong *json.UnmarshalTypeError) string {
	return fmt.Sprintf("there is %s where %s belongs", found(wrong.Value), expected(wrong.Type))
}

// Fields are a struct's as a file has them.
func Fields(t reflect.Type) (out []string) {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		out = append(out, name)
	}
	return out
}

// found is a value of JSON in words: its kind, of a number also which.
func found(value string) string {
	switch value {
	case "array":
		return "a list"
	case "object":
		return "a mapping"
	case "bool":
		return "true or false"
	case "number":
		return "a number"
	case "string":
		return "a word"
	}
	return "the " + value
}

// expected is a field's type in words.
func expected(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list, as [A, B],"
	case reflect.Struct:
		if t.NumField() <= 12 { // metadata has more than anybody reads
			return "{" + strings.Join(Fields(t), ", ") + "}"
		}
		return "a mapping"
	case reflect.Map:
		return "a mapping"
	case reflect.Uint16:
		return "a number from 0 to 65535"
	case reflect.Int, reflect.Int32:
		return "a whole number"
	}
	return "a word"
}
