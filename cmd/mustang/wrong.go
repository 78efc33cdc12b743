// SPDX-License-Identifier: Apache-2.0

package main

// What is wrong with a file of Services or nodes, in the words of the file.

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"sigs.k8s.io/yaml"
)

// wrongEntry is what is wrong with the first of list that is no T, by its number from 1.
func wrongEntry[T any](list []any) error {
	for i, entry := range list {
		if err := within(fmt.Sprintf("entry %d", i+1), wrongFields[T](entry)); err != nil {
			return err
		}
	}
	return nil
}

// within is an error with the place before it; nil stays nil.
func within(place string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", place, err)
}

// wrongFields is what is wrong with v, which is to be a T: its field, and what belongs there.
func wrongFields[T any](v any) error {
	var to T
	text, err := yaml.Marshal(v)
	if err == nil {
		err = yaml.UnmarshalStrict(text, &to)
	}
	fields := reflect.TypeFor[T]()
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		if wrong.Field == "" {
			return fmt.Errorf("there is %s where {%s} belongs", found(wrong.Value), strings.Join(names(fields), ", "))
		}
		return fmt.Errorf("%s: there is %s where %s belongs", wrong.Field, found(wrong.Value), expected(wrong.Type))
	}
	if err != nil {
		if _, name, ok := strings.Cut(err.Error(), "json: unknown field "); ok {
			return fmt.Errorf("unknown field %s; the fields are %s", name, strings.Join(names(fields), ", "))
		}
	}
	return err
}

// names are a struct's fields as a file has them.
func names(t reflect.Type) (out []string) {
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
		return "{" + strings.Join(names(t), ", ") + "}"
	case reflect.Uint16:
		return "a number from 0 to 65535"
	case reflect.Int:
		return "a whole number"
	}
	return "a word"
}
