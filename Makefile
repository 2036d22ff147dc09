# Every target first installs missing Debian packages (tests/setup) and builds what it needs.
export PATH := $(HOME)/.cargo/bin:$(PATH)
export CARGO_TARGET_DIR ?= $(CURDIR)/target
RINGS ?= pure netns vm
PREFIX ?= /usr
DESTDIR ?=
# With PROFILE=dev, `documents` and `deb` use the binaries that tests/run has built.
PROFILE ?= release
programs := $(CARGO_TARGET_DIR)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
share := $(programs)/share
tools := $(CARGO_TARGET_DIR)/tools
# Installs a program from crates.io for use by this file. Arguments: its name; its version. Each program runs once or twice, so
# it is not optimised. It is built without the project's lints.
tool = test -x $(tools)/bin/$(1) || env -u RUSTC_WORKSPACE_WRAPPER CARGO_PROFILE_DEV_DEBUG=0 \
	cargo install --quiet --locked --debug --no-default-features --root $(tools) --target-dir $(tools) $(1)@$(2)

# The programs of a release that measures. With fewer of them, cargo would choose other features, and build nearly everything again.
measured := cargo build --release -p paced -p pacectl -p perf

.PHONY: run demo demo-llm test lint deny deny-once bench bench-diff bench-models papers programs documents install deb

run: ## Runs the relay from a quick build: a payload costs up to 15 % more than with a release. Without ARGS, in development mode on localhost:4433; or ARGS="--config FILE".
	@tests/setup build
	cargo build --profile quick --bins
	$(CARGO_TARGET_DIR)/quick/paced run $(ARGS)

demo: ## Shows three classes of requests on a slow link, without and with scheduling, in virtual time. Needs no root.
	@tests/setup build
	cargo build --release -p perf
	@$(CARGO_TARGET_DIR)/release/paced-perf run thesis-fig7-8 --variant bbr --scheduler plain,ml-edf --plot $(CARGO_TARGET_DIR)/demo.svg $(ARGS)

demo-llm: ## Serves a mix of requests with three real engines behind a thin link: round robin over HTTP, compared with paced. Needs root. ENGINE=emulated builds no engine.
	@tests/setup build demo
	$(measured)
	@tests/engines/demo.sh $(ARGS)

test: ## Runs all tests and ends with their counts. RINGS="pure netns" leaves out the tests under qemu.
	@tests/setup test $(RINGS)
	@RINGS="$(RINGS)" tests/run

lint:
	@tests/setup lint
	cargo fmt --check
	cargo fmt --check --manifest-path perf/peers/quinn-relay/Cargo.toml
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps

# All that the check reads in this repository.
deny_inputs = deny.toml Cargo.lock $(shell git ls-files Cargo.toml '*/Cargo.toml' ':!perf/peers')
deny: ## Checks the licences, sources and bans of all crates of the workspace (deny.toml). ADVISORIES=DIR: also known vulnerabilities, in this copy of the database.
	@tests/setup build
	@$(call tool,cargo-deny,0.20.2)
	$(tools)/bin/cargo-deny --locked check bans licenses sources
	@cat $(deny_inputs) | sha256sum >.ci/deny.passed
ifdef ADVISORIES
	@mkdir -p $(tools)/advisories && ln -sfn $(abspath $(ADVISORIES)) $(tools)/advisories/advisory-db-3157b0e258782691
	@{ cat deny.toml; echo 'db-path = "$(tools)/advisories"'; } > $(tools)/deny.toml
	$(tools)/bin/cargo-deny --locked --offline --config $(tools)/deny.toml check advisories
else
	@echo "skipped: advisories, because ADVISORIES names no copy of the database"
endif

deny-once: # For CI: building cargo-deny takes longer than most of the tests.
	@cat $(deny_inputs) | sha256sum | cmp --silent - .ci/deny.passed && echo "deny: passed with these files (.ci/deny.passed)" || \
		$(MAKE) --no-print-directory deny

bench: ## Measures paced and its peers on this machine, in less than ten minutes. ARGS=--quick: one short round.
	@tests/setup bench
	$(measured)
	@perf/peers/build.sh $(CARGO_TARGET_DIR)/peers || test $$? = 3
	$(CARGO_TARGET_DIR)/release/paced-perf bench $(ARGS)

bench-diff: ## Measures a payload's cost in instructions, here and at the commit BASE, in three minutes once built. ARGS="--rounds 3".
	@tests/setup vm
	@perf/bench-diff.sh $(BASE) $(ARGS)

# This does not install nginx: Debian's package starts a server on port 80. litellm handles only a twentieth of the load, so it
# has its own table.
bench-models: ## Measures the gateway for models, litellm, and nginx if it is installed, in seven minutes. ARGS="whole": another load.
	@tests/setup build demo
	$(measured)
	@perf/peers/litellm.sh $(CARGO_TARGET_DIR)/peers || test $$? = 3
	$(CARGO_TARGET_DIR)/release/paced-perf serving $(or $(ARGS),tokens)
ifndef ARGS
	$(CARGO_TARGET_DIR)/release/paced-perf serving --peers direct,paced,nginx,nginx-twice-tls,litellm tokens --streams 50
endif

papers: ## Runs all experiments of the papers; continues where it stopped. BUDGET=2h sets a limit. ARGS="--no-lab", or names of plans.
	@tests/setup build netns vm
	$(measured)
	@perf/peers/build.sh $(CARGO_TARGET_DIR)/peers || test $$? = 3
	$(CARGO_TARGET_DIR)/release/paced-perf papers $(if $(BUDGET),--budget $(BUDGET)) $(ARGS)

programs:
ifeq ($(PROFILE),release)
	@tests/setup build
	cargo build --release --bins
endif

documents: programs
	@rm -rf $(share) && mkdir -p $(share)/man
	@$(programs)/pacectl man $(share)/man && $(programs)/paced man $(share)/man
	@$(programs)/paced config schema > $(share)/paced.schema.json
	@$(programs)/pacectl completions bash > $(share)/pacectl.bash
	@$(programs)/pacectl completions zsh > $(share)/_pacectl
	@$(programs)/pacectl completions fish > $(share)/pacectl.fish
	@mkdir -p $(share)/doc/docs
	@for page in README.md docs/*.md; do sed -Ez -f docs/packaged.sed $$page > $(share)/doc/$$page || exit; done

# dbus-daemon reads policies below /usr/share and /etc only.
bus_policies = $(if $(filter /usr,$(PREFIX)),$(PREFIX)/share,/etc)/dbus-1/system.d

# Debian's zsh reads completions of packages and of this machine's own programs from folders of different names.
zsh_functions = $(if $(filter /usr,$(PREFIX)),vendor-completions,site-functions)

install: documents ## Installs binaries, documents, units, user, bus policy and sample configuration below DESTDIR. PREFIX=/usr/local: not below /usr.
	@test "$(PREFIX)" = /usr || test "$(PREFIX)" = /usr/local || { echo "systemd and D-Bus look below /usr and /usr/local only: set PREFIX to one of them" >&2; exit 1; }
	install -D -t $(DESTDIR)$(PREFIX)/bin $(programs)/paced $(programs)/pacectl
	for section in 1 5 8; do install -D -t $(DESTDIR)$(PREFIX)/share/man/man$$section -m 644 $(share)/man/*.$$section; done
	install -D -m 644 $(share)/pacectl.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/pacectl
	install -D -t $(DESTDIR)$(PREFIX)/share/zsh/$(zsh_functions) -m 644 $(share)/_pacectl
	install -D -t $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d -m 644 $(share)/pacectl.fish
	install -D -m 644 systemd/paced.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/paced.conf
	install -D -m 644 systemd/paced.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/paced.conf
	install -D -t $(DESTDIR)$(bus_policies) -m 644 systemd/org.paced.Paced1.conf
	install -D -t $(DESTDIR)$(PREFIX)/share/dbus-1/system-services -m 644 systemd/org.paced.Paced1.service
	install -D -t $(DESTDIR)$(PREFIX)/share/dbus-1/interfaces -m 644 systemd/org.paced.Control1.xml
	install -D -t $(DESTDIR)$(PREFIX)/share/polkit-1/actions -m 644 systemd/org.paced.Paced1.policy
	install -D -t $(DESTDIR)$(PREFIX)/share/paced -m 644 $(share)/paced.schema.json systemd/kernel.conf systemd/80-paced.network \
		perf/grafana.json perf/alerts.yml
	install -D -t $(DESTDIR)$(PREFIX)/share/doc/paced -m 644 $(share)/doc/README.md
	install -D -t $(DESTDIR)$(PREFIX)/share/doc/paced/docs -m 644 $(share)/doc/docs/*.md
	sed -i 's|/usr/share/|$(PREFIX)/share/|g' $(DESTDIR)$(PREFIX)/share/paced/alerts.yml $(DESTDIR)$(PREFIX)/share/doc/paced/README.md \
		$(DESTDIR)$(PREFIX)/share/doc/paced/docs/*.md
	install -D -t $(DESTDIR)$(PREFIX)/share/paced/policies -m 644 config/policies/*
	install -D -t $(DESTDIR)$(PREFIX)/lib/systemd/system -m 644 systemd/paced.socket
	sed 's|/usr/bin/|$(PREFIX)/bin/|' systemd/paced.service > $(DESTDIR)$(PREFIX)/lib/systemd/system/paced.service
	test -e $(DESTDIR)/etc/paced/paced.toml || { install -D -m 640 config/paced.toml $(DESTDIR)/etc/paced/paced.toml && \
		sed -i 's|/usr/share/|$(PREFIX)/share/|' $(DESTDIR)/etc/paced/paced.toml; }
	@test "$(PREFIX)" = /usr || echo "polkit of Debian 12 reads actions below /usr/share only: there, only root and \`writers\` may write over D-Bus"
	# With DESTDIR, the package's postinst must do this (see systemd/debian/postinst).
	test -n "$(DESTDIR)" || { systemd-sysusers paced.conf; systemd-tmpfiles --create paced.conf; chgrp paced /etc/paced/paced.toml; }

deb: documents ## Builds a Debian package with the files of `install`: $(programs)/paced.deb.
	@tests/setup deb
	@systemd/debian/build $(PROFILE) $(programs)/paced.deb
