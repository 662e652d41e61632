# make demo and make test need Python 3.10 or newer, pip and make. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
# make oldest and make newest have environments of their own, for the oldest and the newest Python that is supported.
OLDEST_PYTHON ?= python3.10
OLDEST := .venv-oldest
NEWEST_PYTHON ?= python3.13
NEWEST := .venv-newest
RUN := $(VENV)/bin/python
# Developers install all extras and a dependency group, for which an older pip has no option.
EXTRAS := cli,examples,ray,report,wandb,zmq
INSTALL := -m pip install --quiet --disable-pip-version-check
NEW_PIP := 'pip>=25.1'
# Hundreds of processes import torch, and without its byte code each of them compiles it again.
unexport PYTHONDONTWRITEBYTECODE
# Groups of tests run side by side, since many tests wait for processes: all that is in no group prints as it runs, and
# LAST follows it, beside SLOTS other groups, the longest first. Their output follows, and after it what failed in any
# group. More groups at a time end no sooner on two cores, but time out there.
SLOTS := 3
GROUPS := 'tests/component' 'tests/lightning/test_[p-r]*.py' 'tests/lightning/test_[s-z]*.py' \
	'tests/lightning/test_[m-o]*.py tests/examples' 'tests/lightning/test_[a-h]*.py' 'tests/lightning/test_[ij]*.py' \
	'tests/lightning/test_[kl]*.py'
LAST := tests/conformance tests/ray tests/transport
OTHERS := $(foreach folder,component conformance examples lightning ray transport,--ignore=tests/$(folder))
define run-tests
@rm -f $(VENV)/tests*.log; printf '%s\0' $(GROUPS) \
| xargs -0 -P $(SLOTS) -I{} sh -c '$(RUN) -m pytest {} $(1) > $(VENV)/tests-$$$$.log 2>&1' & groups=$$!; \
{ $(RUN) -m pytest tests $(OTHERS) $(1); echo $$? > $(VENV)/tests-code; } | tee $(VENV)/tests.log; \
$(RUN) -m pytest $(LAST) $(1) > $(VENV)/tests-last.log 2>&1 || echo $$? > $(VENV)/tests-code; \
code=$$(cat $(VENV)/tests-code); wait $$groups || code=$$?; \
cat $(VENV)/tests-*.log; grep -hE '^(FAILED|ERROR|E  ) ' $(VENV)/tests*.log | tail -n 40; exit $$code
endef

define install-beside
@echo "Installing the project and the versions of $(3) into $(1): this takes some minutes."
@$(2) -m venv $(1)
@$(1)/bin/python $(INSTALL) $(NEW_PIP)
@$(1)/bin/python $(INSTALL) --no-compile -c $(3) -e '.[$(EXTRAS)]' --group dev
@touch $@
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo docs test test-all oldest newest check format bench monitor race convergence accuracy sets parts clients claims layerwise scale crowd predicted regress algorithms rules codes rows served buffers rounds programs ray streams techniques compatibility gpu memory chaos storm elastic engines interrupt disks stopping several strangers ports islands soak loop wheels dist newcomer pictures screenshots clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'

demo: $(VENV)/.installed-examples ## train digits with DDP and A-SGD, equal workers and a slow one, and compare them
	@$(RUN) examples/quickstart.py

docs: $(VENV)/.installed-docs ## make the documentation site, build/docs/index.html
	@$(RUN) -m sphinx --fail-on-warning --quiet --builder html docs build/docs
	@echo "Made build/docs/index.html"

test: check ## check, then run the tests
	$(call run-tests)

test-all: check ## the same with the slow tests
	$(call run-tests,-m "")

oldest: $(OLDEST)/.installed ## the conformance tests with the oldest torch and Lightning; OLDEST_PYTHON=
	@$(OLDEST)/bin/python -m pytest tests/conformance tests/lightning/test_fit.py tests/lightning/test_fabric.py tests/lightning/test_arguments.py --timeout 240

newest: $(NEWEST)/.installed ## the same with the newest Python, torch and Lightning; NEWEST_PYTHON=
	@$(NEWEST)/bin/python -m pytest tests/conformance tests/lightning/test_fit.py tests/lightning/test_fabric.py tests/lightning/test_arguments.py --timeout 240

check: $(VENV)/.installed-dev ## lint, formatting and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

format: $(VENV)/.installed-dev ## format the code and mend what can be mended
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

bench: $(VENV)/.installed-examples ## samples per second beside DDP and local SGD, with fast, slow and distant workers
	@$(RUN) benchmarks/throughput.py --suite --check --json results/bench.json

monitor: $(VENV)/.installed-examples ## what it costs to log what the workers do
	@$(RUN) benchmarks/monitor.py

race: $(VENV)/.installed-examples ## seconds to an accuracy and to a loss, beside one worker, DDP, local SGD and the fastest 3 of 4: 80 minutes
	@$(RUN) benchmarks/race.py
	@$(RUN) benchmarks/race_text.py

convergence: $(VENV)/.installed-examples ## accuracy beside DDP
	@$(RUN) benchmarks/convergence.py

algorithms: $(VENV)/.installed-examples ## every algorithm on the same tasks
	@$(RUN) benchmarks/algorithms.py

rounds: $(VENV)/.installed-examples ## rounds of outer momentum under faults, and with a changing number of workers: ten minutes
	@$(RUN) benchmarks/outer_rounds.py

rules: $(VENV)/.installed-examples ## every rule beside DDP, local SGD and A-SGD on three sets: 65 minutes; continues where it was interrupted; ONLY=
	@$(RUN) benchmarks/rules.py $(if $(ONLY),--only $(ONLY)) --picture results/rules.png

buffers: $(VENV)/.installed-examples ## buffers of every kind beside DDP, and batch norm's statistics: half an hour; ONLY=
	@$(RUN) -m benchmarks.buffers $(if $(ONLY),--only '$(ONLY)',--page)
	@$(RUN) -m benchmarks.batch_norm

codes: $(VENV)/.installed-examples ## codes of exchanges: speed, loss, bytes, slow links (as root): 25 minutes; ONLY=
	@$(RUN) benchmarks/codes.py $(if $(ONLY),--only $(ONLY))

rows: $(VENV)/.installed-examples ## tables of which rows are exchanged: bytes, accuracy, slow links beside DDP (as root): 18 minutes; ONLY=
	@$(RUN) benchmarks/rows.py $(if $(ONLY),--only $(ONLY))

served: $(VENV)/.installed-examples ## embeddings that lie on the servers: killed servers, speed, equal values: 20 minutes, 11 GB of disk; ONLY=
	@$(RUN) benchmarks/served_tables.py $(if $(ONLY),--only $(ONLY))

programs: $(VENV)/.installed-examples ## other people's libraries and data sets beside one process and DDP; ONLY=<name>, PAGE=1
	@$(RUN) -m benchmarks.programs $(if $(ONLY),--only '$(ONLY)') $(if $(PAGE),--page)

streams: $(VENV)/.installed-examples ## data sets with shards, of other people's libraries: samples counted, epochs timed
	@$(RUN) benchmarks/streams.py

regress: $(VENV)/.installed-examples ## speed and memory beside another commit's; BASE=<commit> (as root)
	@$(RUN) benchmarks/regress.py $(or $(BASE),$(error Say which commit to compare with: make regress BASE=<commit>))

accuracy: $(VENV)/.installed-examples ## accuracy on Fashion-MNIST beside DDP: hours, goes on where it was interrupted
	@$(RUN) benchmarks/accuracy.py

sets: $(VENV)/.installed-examples ## accuracy on four data sets, 2 to 16 workers, in virtual time: hours; continues where it was interrupted
	@$(RUN) benchmarks/accuracy_sets.py

robustness: $(VENV)/.installed-examples ## A-SGD beside DDP with slow, late and lost workers, large rates, low precision: half an hour; continues where it was interrupted
	@$(RUN) benchmarks/robustness.py

claims: $(VENV)/.installed-dev ## claims of four papers, in virtual time: Yu, SparkNet, SpeeDO, asynchronous SG-MCMC
	@$(RUN) benchmarks/claims.py

ray: $(VENV)/.installed-dev ## a Ray cluster on this machine: accuracy, lost nodes, scaling, Ray Train, Ray Tune
	@$(RUN) benchmarks/ray_cluster.py

scale: $(VENV)/.installed-dev ## CPU time of a claim, an exchange, ... on the servers with 16 to 1,024 workers; LINK=<Mbit/s>
	@$(RUN) benchmarks/scale.py $(if $(LINK),--link $(LINK))
	@$(RUN) benchmarks/scale_sockets.py $(if $(LINK),--link $(LINK))

crowd: $(VENV)/.installed-dev ## 64 workers on two cores, of which 100 are killed and replaced: half an hour; MINUTES=
	@$(RUN) benchmarks/crowd.py $(if $(MINUTES),--minutes $(MINUTES))

predicted: $(VENV)/.installed-examples ## what plan and the simulator predict, beside real steps, jobs and servers
	@$(RUN) benchmarks/predicted_jobs.py
	@$(RUN) benchmarks/predicted.py

layerwise: $(VENV)/.installed-examples ## layer-wise descent beside DDP, also on slow networks (as root): about 40 minutes
	@$(RUN) benchmarks/layerwise.py

parts: $(VENV)/.installed-examples ## what early accuracy is lost to: one cause at a time, in virtual time; WORKERS=, OPTIMIZER=
	@$(RUN) benchmarks/accuracy_parts.py $(if $(WORKERS),--workers $(WORKERS)) $(if $(OPTIMIZER),--optimizer $(OPTIMIZER))

clients: $(VENV)/.installed-examples ## Paine et al.'s figures with 1 to 16 clients, in virtual time
	@$(RUN) benchmarks/clients.py

techniques: $(VENV)/.installed-examples ## caches and shared preparation on slow disks, after Mohan et al. (two machines as root)
	@$(RUN) benchmarks/data_techniques.py

compatibility: $(VENV)/.installed-dev ## write docs/compatibility.md from the conformance tests, and run them all
	@$(RUN) -m tests.conformance.page
	@$(RUN) -m pytest tests/conformance -m ""

gpu: $(VENV)/.installed-dev ## what needs an accelerator, in a quarter of an hour: tests, speed, memory, a trace; writes results/gpu.md
	@$(RUN) benchmarks/gpu.py

memory: $(VENV)/.installed-examples ## memory of workers and servers
	@$(RUN) benchmarks/memory.py

chaos: $(VENV)/.installed-examples ## workers are stopped and killed while they train: what is lost
	@$(RUN) benchmarks/chaos.py

storm: $(VENV)/.installed-examples ## eight workers and two servers on nine machines are killed, stopped and cut off
	@$(RUN) benchmarks/storm.py
	@$(RUN) benchmarks/lost_hosts.py
	@$(RUN) benchmarks/run_hosts.py

elastic: $(VENV)/.installed-examples ## from one worker to six and back within an epoch: seconds to join and to take over
	@$(RUN) benchmarks/elastic.py

engines: $(VENV)/.installed-engines ## torchrun, Kubernetes, Kubeflow and SLURM start, restart and end workers (as root); ONLY=
	@$(RUN) benchmarks/engines.py $(if $(ONLY),--only $(ONLY))
	@$(RUN) -m pytest tests/examples/test_manifests.py

interrupt: $(VENV)/.installed-examples ## jobs are interrupted at random moments: what stays behind
	@$(RUN) benchmarks/interrupt.py

disks: $(VENV)/.installed-dev ## disks that are full, read-only, slow or gone while a job trains, flipped bits (as root); ONLY=
	@$(RUN) -m benchmarks.disks $(if $(ONLY),--only '$(ONLY)')

stopping: $(VENV)/.installed-dev ## Ctrl-C and SIGTERM in every process of every way to run: twenty minutes; ONLY=
	@$(RUN) benchmarks/stopping.py $(if $(ONLY),--only '$(ONLY)')

several: $(VENV)/.installed-dev ## several Trainers in one process, pytest, notebooks, Hydra, beside DDP; ONLY=, PAGE=1
	@$(RUN) -m benchmarks.several_trainers $(if $(ONLY),--only '$(ONLY)') $(if $(PAGE),--page)

strangers: $(VENV)/.installed-examples ## processes, connections and messages that a job does not expect (as root: on two machines too)
	@$(RUN) benchmarks/strangers.py
	@$(RUN) benchmarks/another_user.py
	@$(RUN) -m benchmarks.fuzz

ports: $(VENV)/.installed-examples ## a job through one port: firewall, NAT, a tunnel that is restarted, IPv6 (as root, with iptables)
	@$(RUN) benchmarks/one_port.py

islands: $(VENV)/.installed-dev ## islands of ranks: killed ones, accuracy, checkpoints, speed, bytes, memory (as root); ONLY=
	@$(RUN) benchmarks/islands.py $(if $(ONLY),--only $(ONLY))

soak: $(VENV)/.installed-examples ## 200 short fits in a row leave nothing behind
	@$(RUN) benchmarks/soak.py

loop: $(VENV)/.installed-dev ## plain loops and Fabric: accuracy beside a Trainer, speed beside loops that never talk, a killed worker
	@$(RUN) benchmarks/plain_loop.py

wheels: $(VENV)/.installed-dev ## build and check sdist and wheel, and try them in empty environments; ONLY=, OLDEST_PYTHON=, NEWEST_PYTHON=
	@$(RUN) benchmarks/wheels.py $(if $(ONLY),--only $(ONLY),--pythons $(OLDEST_PYTHON) $(NEWEST_PYTHON))

dist: ## dist/: sdist and wheel of the last commit's time, built and checked as for a release
	@$(PYTHON) benchmarks/wheels.py --build dist

newcomer: $(VENV)/.installed-dev ## what the documentation promises to a newcomer, done from its pages (as root, Linux)
	@$(RUN) -m benchmarks.newcomer_readme
	@$(RUN) -m benchmarks.newcomer

pictures: $(VENV)/.installed-examples ## draw the plots of README and the docs from docs/images/data; TAKE=1 takes over results/ first
	@$(RUN) -m docs.pictures $(if $(TAKE),--take)

screenshots: $(VENV)/.installed-screenshots docs ## pictures of site, report and terminal view, and what is wrong with them; BROWSER=, BROWSER_OPTIONS=
	@$(RUN) examples/monitor.py
	@$(RUN) -m docs.screenshots $(if $(BROWSER),--browser $(BROWSER)) -- $(BROWSER_OPTIONS)

clean: ## remove .venv, caches and results
	rm -rf $(VENV) $(OLDEST) $(NEWEST) results build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per group, and one for the examples: pip runs again only after a change of pyproject.toml or constraints.txt.
# Compiling everything would take a minute, so Python compiles what it imports, and keeps it: every process of the tests
# would do it again otherwise.
unexport PYTHONDONTWRITEBYTECODE
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(RUN)
	@echo "Installing the project and what $* needs into $(VENV): torch is large, the first time takes some minutes."
	@$(RUN) $(INSTALL) $(NEW_PIP)
	@$(RUN) $(INSTALL) --no-compile -c constraints.txt $(if $(filter examples,$*),-e '.[examples]',-e '.[$(EXTRAS)]' --group $*)
	@touch $@
	@$(if $(filter dev,$*),touch $(VENV)/.installed-docs $(VENV)/.installed-examples)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install-beside,$(OLDEST),$(OLDEST_PYTHON),constraints-oldest.txt)

$(NEWEST)/.installed: pyproject.toml constraints.txt
	$(call install-beside,$(NEWEST),$(NEWEST_PYTHON),constraints.txt)

# Some distributions ship venv without ensurepip: then the pip of $(PYTHON) fills the new environment.
$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=...") if sys.version_info < (3, 10) else 0'
	@$(PYTHON) -m venv $(VENV) > /dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip --disable-pip-version-check --quiet --python $@ install pip; }
