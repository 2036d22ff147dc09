# Every target installs the Debian packages that it lacks (tests/setup) and builds what it needs.
export PATH := $(HOME)/.cargo/bin:$(PATH)
export CARGO_TARGET_DIR ?= $(CURDIR)/target
RINGS ?= pure netns vm
PREFIX ?= /usr
DESTDIR ?=

.PHONY: run demo test lint bench install

run: ## The relay. Without ARGS in development mode on localhost:4433; else e.g. ARGS="--config FILE".
	@tests/setup build
	cargo build --release --bins
	$(CARGO_TARGET_DIR)/release/paced run $(ARGS)

demo: ## Three classes of requests on a slow link, without and with scheduling, in virtual time; needs no root.
	@tests/setup build
	cargo build --release -p perf
	@$(CARGO_TARGET_DIR)/release/paced-perf run thesis-fig7-8 --variant bbr --scheduler plain,ml-edf --plot $(CARGO_TARGET_DIR)/demo.svg $(ARGS)

test: ## All tests, ending with counts. RINGS="pure netns" leaves a ring out.
	@tests/setup test $(RINGS)
	@RINGS="$(RINGS)" tests/run

lint:
	@tests/setup lint
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings

bench: ## paced and its peer on this machine, in less than six minutes. ARGS=--quick: one short round.
	@tests/setup bench
	cargo build --release -p paced -p perf
	@perf/peers/quic-go-relay/build.sh $(CARGO_TARGET_DIR)/peers || test $$? = 3
	$(CARGO_TARGET_DIR)/release/paced-perf bench $(ARGS)

install: ## Binaries, unit, user, bus policy and sample configuration below DESTDIR.
	@tests/setup build
	cargo build --release --bins
	install -D -t $(DESTDIR)$(PREFIX)/bin $(CARGO_TARGET_DIR)/release/paced $(CARGO_TARGET_DIR)/release/pacectl
	install -D -m 644 systemd/paced.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/paced.conf
	install -D -t $(DESTDIR)$(PREFIX)/share/dbus-1/system.d -m 644 systemd/org.paced.Paced1.conf
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's|/usr/bin/|$(PREFIX)/bin/|' systemd/paced.service > $(DESTDIR)$(PREFIX)/lib/systemd/system/paced.service
	test -e $(DESTDIR)/etc/paced/paced.toml || install -D -m 644 config/paced.toml $(DESTDIR)/etc/paced/paced.toml
