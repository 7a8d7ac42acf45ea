# Everything a fresh Debian 12 needs is set up by the target that needs it: start with `make demo`.

# Tests start commands by the hundred: each would compile all of vmckpt anew.
unexport PYTHONDONTWRITEBYTECODE

# The one that the Debian packages below belong to; another in PATH may be built for debugging, and slow.
PYTHON ?= /usr/bin/python3
QEMU ?= 10.0
BENCH ?= overhead
BIN := .venv/bin

# What the machine itself must have. QEMU, libvirt, sshd and the guest's parts are unpacked into
# the user's cache.
APT_PACKAGES := fuse3 gcc iproute2 libc6-dev libvirt-dev openssh-client openssh-server pkg-config \
	python3-dev python3-venv util-linux

# Folders with Python in them: mypy refuses a name that is not there.
CODE := vmckpt $(patsubst %/,%,$(sort $(dir $(wildcard images/*.py cluster/*.py tests/*.py benchmarks/*.py debian/*.py website/*.py))))

# Pythons that hosts may have: Debian 12, Ubuntu 24.04, Debian 13.
WHEELS_FOR ?= 3.11 3.12 3.13

COMPILE = $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links

# What `make check` runs: `make check QUICK_TESTS=` before `make test`, which has them too.
QUICK_TESTS ?= -m "not slow" tests/unit tests/contract

# All that the tests without QEMU take.
TOOLS = build/etcd-3.4 build/promtool-2.42 build/ocf-4.12
TOOLS_ENV = VMCKPT_TEST_ETCD="$$(tail -n 1 build/etcd-3.4)" \
	VMCKPT_TEST_PROMTOOL="$$(tail -n 1 build/promtool-2.42)" \
	VMCKPT_TEST_OCF_TESTER="$$(tail -n 1 build/ocf-4.12)"
# `make test QEMU=...` has no meaning: tests take both.
TEST_ENV = VMCKPT_TEST_IMAGE="$$(tail -n 1 build/image)" \
	VMCKPT_TEST_QEMU_7_2="$$(tail -n 1 build/qemu-7.2)" \
	VMCKPT_TEST_QEMU_10_0="$$(tail -n 1 build/qemu-10.0)" \
	VMCKPT_TEST_QEMU_11_1="$$(tail -n 1 build/qemu-11.1 2>/dev/null)" \
	VMCKPT_TEST_HOSTS="$$(tail -n 1 build/hosts-11.3)" $(TOOLS_ENV)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup packages demo any-vm test test-vfio test-kernel test-packages test-systemd faults long check bench tour docs wheels dist role lock clean always

help: ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 18

setup: .venv/made ## Debian packages and a virtual environment in .venv

demo: setup build/image build/qemu-$(QEMU) ## Move a running VM between two hosts here (QEMU=7.2|10.0|11.1)
	$(BIN)/vmckpt lab demo --image "$$(tail -n 1 build/image)" \
		--qemu "$$(tail -n 1 build/qemu-$(QEMU))"

test: setup build/image build/qemu-7.2 build/qemu-10.0 build/hosts-11.3 $(TOOLS) ## All tests, with real QEMUs and guests
	$(TEST_ENV) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not role and not packages and not systemd and not kernel and not vfio"

faults: setup build/image build/qemu-10.0 build/qemu-7.2 build/hosts-11.3 $(TOOLS) ## Every fault at every step of every method (long)
	$(TEST_ENV) $(BIN)/pytest --long -s -q tests/qemu/test_faults.py

long: setup build/image build/qemu-11.1 build/qemu-10.0 build/qemu-7.2 build/hosts-11.3 $(TOOLS) ## All that `make test` leaves out (hours)
	$(TEST_ENV) $(BIN)/pytest --long -m long

any-vm: setup build/image build/qemu-10.0 build/hosts-11.3 ## Every operation with every kind of VM; writes docs/any-vm.md (a quarter of an hour)
	VMCKPT_TEST_ANY_VM=1 $(TEST_ENV) $(BIN)/pytest --long -q tests/real/test_any_vm.py

test-kernel: setup build/image build/qemu-10.0 build/kernel-6.12 ## Memory tracking on Debian's own kernels, in guests: without PAGEMAP_SCAN, and with vhost-net
	VMCKPT_TEST_KERNEL="$$(tail -n 1 build/kernel-6.12)" $(TEST_ENV) $(BIN)/pytest -s -q -m kernel tests/kernel

test-vfio: setup build/image build/qemu-10.0 ## Detach and attach real VFIO devices, in a guest with an IOMMU (a quarter of an hour and more)
	$(TEST_ENV) $(BIN)/pytest -s -q -m vfio tests/vfio

check: setup $(TOOLS) ## Style, types, layers and the quick tests that need no QEMU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo
	$(if $(QUICK_TESTS),$(TOOLS_ENV) $(BIN)/pytest -n 4 --dist worksteal $(QUICK_TESTS))

bench: setup build/image build/qemu-7.2 build/qemu-10.0 build/hosts-11.3 $(TOOLS) ## Measure (BENCH=overhead: one of benchmarks/)
	$(TEST_ENV) $(BIN)/python -m benchmarks.$(BENCH)

tour: setup build/image build/qemu-10.0 ## Run docs/tour.md, and write its outputs anew
	$(BIN)/python -m benchmarks.tour

docs: setup ## The documentation as a website, in build/site
	$(BIN)/mkdocs build --strict --config-file website/mkdocs.yml

wheels: setup ## vmckpt and its dependencies as files, in dist/wheels, for hosts (WHEELS_FOR="3.11 3.12")
	rm -rf dist/wheels
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir dist/wheels .
	cd dist/wheels && sha256sum vmckpt-*.whl >vmckpt.sha256
	cp requirements-runtime.lock dist/wheels/requirements.txt
	for version in $(WHEELS_FOR); do \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
			--implementation cp --python-version $$version \
			--platform manylinux2014_$$(uname -m) --platform manylinux_2_28_$$(uname -m) \
			--require-hashes --requirement requirements-runtime.lock \
			--dest dist/wheels || exit 1; \
	done

dist: APT_PACKAGES += debhelper lintian
dist: wheels ## A wheel, the sources and a Debian package, in dist
	rm -rf dist/vmckpt* build/deb
	cp dist/wheels/vmckpt-*.whl dist
	$(BIN)/hatchling build --target sdist --directory dist
	mkdir -p build/deb/vmckpt
	tar -C build/deb/vmckpt --strip-components 1 -xf dist/vmckpt-*.tar.gz
	cd build/deb/vmckpt && PIP="$(CURDIR)/$(BIN)/pip" WHEELS="$(CURDIR)/dist/wheels" \
		PYTHONS="$(WHEELS_FOR)" dpkg-buildpackage --build=binary --no-sign
	mv build/deb/*.deb dist
	lintian --fail-on error,warning dist/*.deb

test-packages: APT_PACKAGES += buildah mmdebstrap
test-packages: dist ## The Debian package in bare Debian 12 and 13, and the image (minutes, as root)
	$(BIN)/pytest -m packages tests/packages

test-systemd: APT_PACKAGES += mmdebstrap
test-systemd: dist build/image build/qemu-10.0 $(TOOLS) ## Hosts that systemd boots and shuts down: VMs are handed over, moved away, brought back (minutes, as root)
	$(TEST_ENV) $(BIN)/pytest -s -q -m systemd tests/systemd

role: .venv-ansible/made build/image build/qemu-7.2 build/qemu-10.0 build/hosts-11.3 $(TOOLS) wheels ## The Ansible role: lint, then runs against bare hosts made here (minutes)
	cd ansible && PATH="$(CURDIR)/.venv-ansible/bin:$$PATH" ansible-lint
	PATH="$(CURDIR)/.venv-ansible/bin:$$PATH" $(TEST_ENV) $(BIN)/pytest -m role tests/role

lock: setup ## Resolve the dependencies in pyproject.toml and of ansible/ anew
	$(COMPILE) --extra libvirt --extra mount --extra s3 --extra dev --extra bench --output-file requirements.lock pyproject.toml
	$(COMPILE) --extra mount --extra s3 --constraint requirements.lock --output-file requirements-runtime.lock pyproject.toml
	$(COMPILE) --output-file ansible/requirements.txt ansible/requirements.in

clean: ## Remove what was made here (not the user's cache of images and QEMUs)
	rm -rf .venv .venv-ansible build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

packages:
	@missing=$$(for name in $(APT_PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$name 2>/dev/null | grep -q 'ok installed' || echo $$name; \
	done); \
	[ -z "$$missing" ] || if [ "$$(id -u)" = 0 ]; then \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -q update && apt-get -q install -y --no-install-recommends $$missing; \
	else \
		echo "Debian packages are missing; install them, then run make again:" >&2; \
		echo "  sudo apt-get install --no-install-recommends" $$missing >&2; exit 1; \
	fi

.venv/made: requirements.lock pyproject.toml | packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"vmckpt needs Python 3.11 or newer: make PYTHON=/path/of/a/newer/python3")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.venv-ansible/made: ansible/requirements.txt | packages
	$(PYTHON) -m venv .venv-ansible
	.venv-ansible/bin/pip install --quiet --disable-pip-version-check --requirement ansible/requirements.txt
	@touch $@

# All builders keep caches by content and are quick when there is nothing to do.
build/image: always | setup
	@mkdir -p build
	$(PYTHON) images/build.py >$@

build/qemu-%: always | setup
	@mkdir -p build
	$(PYTHON) images/qemu.py $* >$@

build/hosts-%: always | setup
	@mkdir -p build
	$(PYTHON) images/hosts.py $* >$@

build/etcd-%: always | setup
	@mkdir -p build
	$(PYTHON) images/etcd.py $* >$@

build/kernel-%: always | setup
	@mkdir -p build
	$(PYTHON) images/kernel.py $* >$@

build/promtool-%: always | setup
	@mkdir -p build
	$(PYTHON) images/promtool.py $* >$@

build/ocf-%: always | setup
	@mkdir -p build
	$(PYTHON) images/ocf.py $* >$@
