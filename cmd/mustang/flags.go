// SPDX-License-Identifier: Apache-2.0

package main

// What flags have in common: values that would be lost silently, and the sentences of
// those that cannot be read.

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// oneFile is a flag that names a file: a second one would take the place of the first.
type oneFile string

func (f *oneFile) String() string { return string(*f) }
func (f *oneFile) Type() string   { return "string" }

func (f *oneFile) Set(name string) error {
	if *f != "" {
		return fmt.Errorf("is given twice, %s and %s; put what is in both into one file", *f, name)
	}
	if name == "" {
		return errors.New("is empty; name a file, or - for standard input")
	}
	*f = oneFile(name)
	return nil
}

func fileFlag(cmd *cobra.Command, to *string, name, usage string) {
	cmd.Flags().VarP((*oneFile)(to), name, "f", usage)
}

// filled is a list whose values are not empty: a shell's variable that is would be left
// out silently.
type filled struct{ pflag.Value }

func (v filled) Set(text string) error {
	if text == "" {
		return errors.New("is empty; give a value, or leave the flag out")
	}
	return v.Value.Set(text)
}

// refuseEmpty has all lists of f be filled.
func refuseEmpty(f *pflag.FlagSet) {
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.Type() == "stringSlice" {
			flag.Value = filled{flag.Value}
		}
	})
}

// flagError is wrong usage of a flag: which, what is wrong, and what is expected.
func flagError(cmd *cobra.Command, err error) error {
	wrong := (*pflag.InvalidValueError)(nil)
	if !errors.As(err, &wrong) {
		return usagef("%w; `%s --help` lists the flags", err, cmd.CommandPath())
	}
	flag := wrong.GetFlag()
	kind := flag.Value.Type()
	if expected, ok := expectedOf[kind]; ok {
		return usagef("--%s: %q is not %s", flag.Name, wrong.GetValue(), expected)
	}
	if kind == "string" || kind == "stringSlice" {
		return usagef("--%s %w", flag.Name, wrong.Unwrap())
	}
	return usagef("%w; `%s --help` says what it takes", err, cmd.CommandPath())
}

// expectedOf says in words what a flag of a type is.
var expectedOf = map[string]string{
	"bool": "true or false", "duration": "a time, as 30s or 3h", "int": "a whole number", "intSlice": "a list of whole numbers",
	"uint16": "a number from 0 to 65535", "uint32": "a number from 0 to 4294967295", "uint64": "a number from 0", "uintSlice": "a list of numbers from 0",
}

// refuseArgs has a command say what arguments it takes, in place of how many.
func refuseArgs(cmd *cobra.Command) {
	check := cmd.Args
	if check == nil {
		return
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		if err == nil || errors.As(err, new(usageError)) {
			return err
		}
		if option := valueApart(cmd); option != nil && len(args) > 0 {
			last := args[len(args)-1]
			return usagef("%q is no argument of `%s`; a value of --%s follows an equals sign, --%s=%s", last, cmd.CommandPath(), option.Name, option.Name, last)
		}
		if len(args) > 0 && cmd.Flags().ShorthandLookup("f") != nil {
			return usagef("%q is no argument of `%s`; give the file by -f %s", args[0], cmd.CommandPath(), args[0])
		}
		return usagef("wrong number of arguments, %d; write `%s`", len(args), cmd.UseLine())
	}
}

// valueApart is a flag that was given, and takes a value only after an equals sign.
func valueApart(cmd *cobra.Command) (found *pflag.Flag) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.NoOptDefVal != "" && f.Value.Type() != "bool" {
			found = f
		}
	})
	return found
}
