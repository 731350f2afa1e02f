// A process group's timeouts, abort, shutdown, children, shared memory, and the barrier that names missing ranks.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <climits>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bind/c10d/backend.h"

namespace ringcomm {
namespace {

constexpr int kMonitorTag = INT_MAX;  // the tag of monitoredBarrier's messages

Call message(Op op, int peer, std::uint8_t* byte, std::int64_t timeout_ms) {
  Call call;
  call.op = op;
  call.root = peer;
  call.tag = kMonitorTag;
  call.input = call.output = byte;
  call.count = 1;
  call.timeout_ms = timeout_ms;
  return call;
}

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

Backend::Backend(std::shared_ptr<Engine> engine, intrusive_ptr<Options> options, DeviceGroup::EngineFactory factory,
                 bool host_memory)
    : c10d::Backend(engine->rank(), engine->world_size()),
      engine_(std::move(engine)),
      options_(std::move(options)),
      devices_(rank_, std::move(factory), host_memory),
      split_child_(intrusive_ptr<c10d::Backend>()) {}

// The engine finishes calls in flight, and its thread may need the GIL to release tensors.
Backend::~Backend() {
  if (PyGILState_Check() == 0) return;
  const py::gil_scoped_release no_gil;
  engine_.reset();
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  engine_->set_timeout(engine_timeout(timeout));
  devices_.set_timeout(engine_timeout(timeout));
  options_->timeout = timeout;
}

c10d::ErrorType Backend::getError() {
  return engine_->aborted() || devices_.aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  const std::string reason = concat("rank ", rank_, " called abort on its process group");
  engine_->abort(reason, ErrorCode::kAborted);
  devices_.abort(reason);
}

void Backend::shutdown() {
  devices_.close();
  engine_->close();
}

Tensor Backend::allocateTensor(long count, at::TensorOptions options) {
  const Site at = site("ringcomm:allocate_tensor");
  if (!options.device().is_cpu() || count < 0) {
    at.refuse("InvalidArgumentError", "got ", count, " elements on ", options.device(),
              ", expected 0 or more on cpu; ask for a cpu tensor, or make one with torch.empty");
  }
  void* data = engine_->allocate(static_cast<std::size_t>(count) * options.dtype().itemsize());
  const auto release = [engine = engine_](void* memory) { engine->release(memory); };
  return at::from_blob(data, {count}, release, options);
}

intrusive_ptr<c10d::Backend> Backend::split(const intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                            const intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) return nullptr;
  const std::string key = concat("split/", opts->group_name, "/", join(ranks));
  if (auto child = split_child_.lock(); child && key == split_key_) return child;

  auto options = c10::make_intrusive<Options>(opts->timeout);
  options->group_name = opts->group_name;
  for (const int rank : ranks) options->global_ranks_in_group.push_back(global_rank(rank));
  const py::gil_scoped_acquire gil;
  const auto create = py::module_::import("ringcomm.backend").attr("create_in");
  auto child = create(store, key, mine - ranks.begin(), options).cast<intrusive_ptr<Backend>>();
  split_key_ = key;
  split_child_ = c10::weak_intrusive_ptr<c10d::Backend>(child);
  return child;
}

intrusive_ptr<c10d::Backend> Backend::shrink(const std::vector<std::int64_t>&, int,
                                             const intrusive_ptr<c10d::Backend::Options>&) {
  refuse_other_members("shrink");
}

void Backend::refuse_other_members(const char* call) const {
  throw ArgumentError("UnsupportedError",
                      concat(call, ": rank ", rank_, " asked a process group of ringcomm for other members, expected ",
                             "the same ranks as long as it exists; abort it and call init_process_group again, or use ",
                             "comm.shrink() of a communicator that ringcomm.init() made"));
}

std::uint64_t Backend::global_rank(int rank) const {
  const auto& ranks = options_->global_ranks_in_group;  // empty in the default group
  return ranks.empty() ? static_cast<std::uint64_t>(rank) : ranks[rank];
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  if (!devices_.serves(device)) return;
  devices_.open(site("ringcomm:init_process_group"), device);
  devices_.connect("init_process_group");
}

// Rank 0 waits for a message of every rank, or reports the missing ranks; then it answers all of them.
void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto limit = std::chrono::milliseconds(opts.timeout.count() >= 0 ? opts.timeout.count() : engine_->timeout());
  std::uint8_t byte = 0;
  if (rank_ != 0) {
    // Longer than rank 0's own limit, so that rank 0's report, which names the missing ranks, comes first.
    const std::int64_t longer_ms = limit.count() + limit.count() / 8 + 200;
    engine_->run(message(Op::kSend, 0, &byte, longer_ms));
    engine_->run(message(Op::kRecv, 0, &byte, longer_ms));
    return;
  }
  const std::vector<int> missing = missing_at_barrier(limit, wait_all_ranks);
  if (!missing.empty()) {
    const std::string report =
        concat("monitored_barrier: rank 0 expected ", size_ - 1, " other ranks within ", limit.count(),
               " ms, but rank ", join(missing), wait_all_ranks ? "" : " (and perhaps others)",
               " did not come; look at what those ranks are doing, then make a new process group");
    engine_->abort(report, ErrorCode::kTimeout);
    fail(ErrorCode::kTimeout, report);
  }
  for (int peer = 1; peer < size_; ++peer) engine_->run(message(Op::kSend, peer, &byte, limit.count()));
}

std::vector<int> Backend::missing_at_barrier(std::chrono::milliseconds limit, bool all) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + limit;
  // Kept alive until the requests end; if a rank is missing, they end when the caller aborts.
  const auto bytes = std::make_shared<std::vector<std::uint8_t>>(size_);
  std::vector<std::shared_ptr<Request>> requests;
  for (int peer = 1; peer < size_; ++peer) {
    requests.push_back(engine_->submit(message(Op::kRecv, peer, &(*bytes)[peer], 2 * limit.count() + 1000)));
    requests.back()->on_done([bytes](std::exception_ptr) {});
  }
  std::vector<int> missing;
  for (int peer = 1; peer < size_ && (all || missing.empty()); ++peer) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    try {
      requests[peer - 1]->wait(std::max<std::int64_t>(left, 1));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kTimeout) throw;
      missing.push_back(peer);
    }
  }
  return missing;
}

}  // namespace ringcomm
