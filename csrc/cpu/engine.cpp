// The cpu engine: ranks are processes or threads of one host and exchange bytes through shared memory.
#include <atomic>
#include <limits>

#include "core/algorithm_counts.h"
#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/engine.h"
#include "core/error.h"
#include "core/reduce.h"
#include "cpu/collectives/direct.h"
#include "cpu/collectives/p2p.h"
#include "cpu/collectives/ring.h"
#include "cpu/collectives/slot_stream.h"
#include "cpu/collectives/staged.h"
#include "cpu/collectives/tuning.h"
#include "cpu/group/heap.h"
#include "cpu/group/state.h"
#include "cpu/kernels/loops.h"
#include "cpu/kernels/pack.h"
#include "runtime/forks.h"
#include "runtime/progress/work_queue.h"

namespace ringcomm {

namespace cpu {
namespace {

// Watches a thread that waits for a call of its own rank, while another thread executes the call and waits for the
// peer.
Watch watch_item(const Group& group) {
  const auto wait = std::make_shared<LongWait>(group, WaitKind::kItem, group.rank(),
                                               std::numeric_limits<std::int64_t>::max(), nullptr);
  return [wait](const std::function<bool()>& has_come) { wait->check(has_come); };
}

// With a world size of one nothing is sent, but avg and premul_sum still change the values.
void run_alone(const Call& call) {
  if (call.op == Op::kBarrier) return;
  const Parts input = input_parts(call), output = output_parts(call);
  const std::size_t count = input.contiguous() ? output.count(0) : input.count(0);
  if (!reduces(call.op)) return kernels().copy(output.data(0), input.data(0), count * element_bytes(call.dtype), false);
  const void* sources[] = {input.data(0)};
  void* outputs[] = {output.data(0)};
  kernels().reduce({call.dtype, call.reduce_op, sources, 1, &call.factor, 1, outputs, 1, count, false});
}

bool direct_pays(const Call& call, std::size_t nbytes) {
  const bool has_form = call.op == Op::kAllReduce || call.op == Op::kReduceScatter || call.op == Op::kAllGather ||
                        call.op == Op::kAllToAll || call.op == Op::kBroadcast;
  if (!has_form || call.algorithm == Algorithm::kOneshot) return false;
  const bool one_sided = call.op == Op::kReduceScatter || call.op == Op::kBroadcast;
  if (one_sided && call.algorithm == Algorithm::kAuto && nbytes >= tuning::kStagedBytes) return false;
  return nbytes >= tuning::kVisibleBytes;
}

// Of a call that is not direct.
bool is_oneshot(const Call& call, int world_size) {
  if (call.op != Op::kAllReduce) return false;
  const bool small = call.count * element_bytes(call.dtype) <= tuning::kOneshotBytes;
  return call.algorithm == Algorithm::kOneshot || (call.algorithm == Algorithm::kAuto && (small || world_size == 2));
}

class CpuEngine final : public Engine {
 public:
  CpuEngine(int rank, int world_size, const EngineOptions& options)
      : forks_(forks_so_far()),
        group_(rank, world_size, options),
        heap_(group_),
        progress_(world_size),
        p2p_(std::make_unique<PointToPoint>(group_)),
        queue_(std::make_unique<WorkQueue>([this](const Call& call) { run_collective(call); },
                                           [this](const char* call) { group_.interrupt(call); }, true,
                                           tuning::kSmallCallBytes, [this] { return watch_item(group_); })) {
    group_.set_activity([this] {
      if (absorbed_.load()) return WaitGraph::Activity{};  // any thread may call it
      const std::size_t queued = queue_->queued();
      return WaitGraph::Activity{true, queue_->executes(), queued, p2p_->pending()};
    });
  }

  // Aborts the group if calls are in flight and close() was not called, so that the peers do not wait for ever.
  ~CpuEngine() override {
    if (forked()) {  // the threads exist in the parent only, which may have held a lock when it forked
      queue_.release();
      p2p_.release();
      group_.disown();
      return;
    }
    group_.forget();
    if (!closed_.load() && !(queue_->idle() && p2p_->idle()))
      group_.abort(concat("rank ", rank(), " went away with calls in flight"), ErrorCode::kAborted);
    close();
  }

  const char* kind() const override { return "cpu"; }
  int rank() const override { return group_.rank(); }
  int world_size() const override { return group_.world_size(); }
  std::string handle() const override { return group_.handle(); }
  void connect(const std::vector<std::string>& handles) override { group_.connect(handles); }

  int run(const Call& call) override {
    check(call);
    if (point_to_point(call.op)) return p2p_->run(call);
    queue_->run(call);
    return -1;
  }
  std::shared_ptr<Request> submit(Call call) override {
    check(call);
    return point_to_point(call.op) ? p2p_->submit(std::move(call)) : queue_->submit(std::move(call));
  }

  std::optional<MessageInfo> probe(const Call& call, bool waits) override {
    check(call);
    return waits ? std::optional(p2p_->probe(call)) : p2p_->probe_now(call);
  }

  void pack(const PackCall& packing) override {
    check_packing(packing, rank());
    cpu::pack(packing);
  }

  void combine(const CombineCall& combining) override {
    check_combining(combining, rank());
    const void* sources[] = {combining.first, combining.second};
    void* outputs[] = {combining.output};
    kernels().reduce(
        {combining.dtype, combining.op, sources, 2, nullptr, combining.divisor, outputs, 1, combining.count, false});
  }

  void* allocate(std::size_t nbytes) override {
    if (forked()) report_unusable("empty", rank(), false, true);
    return heap_.allocate(nbytes);
  }
  // In a forked child, release and abort do nothing: the shared memory and the group belong to the parent.
  void release(void* data) override {
    if (!forked()) heap_.release(data);
  }
  void abort(const std::string& reason, ErrorCode code) override {
    if (!forked()) group_.abort(reason, code);
  }
  bool aborted() const override { return group_.aborted(); }
  std::string why_aborted() const override { return group_.why_aborted(); }
  ErrorCode aborted_as() const override { return group_.aborted_as(); }
  std::vector<std::string> agree_on_shrink(const std::string& message, const std::vector<int>& members,
                                           std::int64_t limit_ms) override {
    if (!group_.connected() || forked())
      fail(ErrorCode::kInvalid, "shrink: rank ", rank(), " expected a connected communicator of this process");
    return group_.agree_on_shrink(message, members, limit_ms);
  }
  void set_timeout(std::int64_t timeout_ms) override {
    if (timeout_ms <= 0)
      fail(ErrorCode::kInvalid, "timeout: rank ", rank(), " expected more than 0 ms, got ", timeout_ms);
    group_.timeout_ms = timeout_ms;
  }
  std::int64_t timeout() const override { return group_.timeout_ms; }

  void close() override {
    if (forked() || closed_.exchange(true)) return;
    if (group_.runs_handler()) group_.interrupt("close");
    queue_->stop();
    p2p_->stop();
    group_.leave();
    group_.forget();  // not only when it is destroyed: the graph has room for a limited number of parties
  }

  bool closed() const override { return closed_.load(); }
  void absorbed() override { absorbed_.store(true); }
  bool runs_this_thread() const override { return queue_->runs_this_thread() || p2p_->runs_this_thread(); }

  bool count_waits(std::shared_ptr<Flag> waited) override {
    group_.count_waits(std::move(waited));
    return true;
  }
  void count_algorithms(std::shared_ptr<Flag> counts) override { algorithm_counts_ = std::move(counts); }
  std::vector<std::pair<std::string, std::string>> describe() const override {
    return {{"engine", "cpu"},
            {"isa", kernels().isa},
            {"ranks", group_.shares_address_space() ? "threads" : "processes"},
            {"cores", std::to_string(available_cores())},
            {"slot_bytes", std::to_string(group_.slot_bytes())},
            {"order", "canonical"}};
  }

 private:
  bool forked() const { return forks_ != forks_so_far(); }

  void check(const Call& call) const {
    const bool closed = closed_.load(std::memory_order_relaxed);
    if (closed || !group_.connected() || forked()) report_unusable(name(call.op), rank(), closed, forked());
    check_call(call, rank(), world_size());
    check_no_copy_engine(call, rank());
    group_.note_caller();
  }

  void run_collective(const Call& call);
  void fail_call(const Call& call, const char* what);
  void note_algorithm(const Call& call, Algorithm used) const;
  std::uint64_t run_connected(SlotStream& slots);
  std::uint64_t run_staged(SlotStream& slots, std::uint64_t first);

  const int forks_;
  Group group_;
  Heap heap_;
  std::shared_ptr<Flag> algorithm_counts_;
  Progress progress_;  // of the collectives
  std::unique_ptr<PointToPoint> p2p_;
  std::unique_ptr<WorkQueue> queue_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> absorbed_{false};
};

// ---- collectives
// The algorithm of a call is chosen, and run.

void CpuEngine::run_collective(const Call& call) {
  const trace::CallSpan span(group_.origin(), static_cast<std::int64_t>(progress_.sequence), call);
  group_.check_abort(call);
  if (group_.world_size() == 1) {
    ++progress_.sequence;
    return run_alone(call);
  }
  SlotStream slots(group_, progress_, call);
  try {
    slots.finish(run_connected(slots));
  } catch (const std::exception& error) {  // a call must not stay half done: the ranks' tickets would differ
    fail_call(call, error.what());
    throw;
  }
}

// Aborts the group, and returns once no peer can access the caller's buffers any more. The error may be a consequence
// of a lost rank, whose memory cannot be opened any more; then the lost rank is reported as the cause.
void CpuEngine::fail_call(const Call& call, const char* what) {
  const auto reclaim_buffers = [this] {
    if (!group_.wait_peers_idle()) heap_.detach();
  };
  try {
    if (!group_.aborted()) group_.check_lost(call);
  } catch (const Error&) {
    reclaim_buffers();
    throw;
  }
  if (!group_.aborted())
    group_.abort(concat(name(call.op), ": rank ", group_.rank(), " failed: ", what), ErrorCode::kAborted);
  reclaim_buffers();
}

void CpuEngine::note_algorithm(const Call& call, Algorithm used) const {
  trace::chose(used);
  count_algorithm(algorithm_counts_.get(), call.op, call.algorithm, used);
}

// Returns the number of tickets used.
std::uint64_t CpuEngine::run_connected(SlotStream& slots) {
  const Call& call = slots.call();
  if (call.algorithm == Algorithm::kRing && call.op != Op::kBarrier) {
    note_algorithm(call, Algorithm::kRing);
    return ring_collective(slots);
  }
  const std::uint64_t count = slots.signature().count;
  const bool uneven = count & kUneven;
  if (uneven || !direct_pays(call, count * element_bytes(call.dtype))) return run_staged(slots, 0);
  publish_buffers(slots, heap_);
  if (!buffers_are_visible(slots)) return 1 + run_staged(slots, 1);
  note_algorithm(call, Algorithm::kDirect);
  direct_collective(slots);
  return 2;
}

std::uint64_t CpuEngine::run_staged(SlotStream& slots, std::uint64_t first) {
  const Call& call = slots.call();
  const bool oneshot = is_oneshot(call, group_.world_size());
  note_algorithm(call, oneshot ? Algorithm::kOneshot : Algorithm::kStaged);
  switch (call.op) {
    case Op::kAllReduce:
      return oneshot ? staged_oneshot_all_reduce(slots, first) : staged_two_phase_reduce(slots, first);
    case Op::kReduce:
      return staged_two_phase_reduce(slots, first);
    case Op::kReduceScatter:
      return staged_reduce_scatter(slots, first);
    case Op::kAllGather:
    case Op::kGather:
      return staged_gather(slots, first);
    case Op::kBroadcast:
      return staged_broadcast(slots, first);
    case Op::kScatter:
      return staged_scatter(slots, first);
    case Op::kAllToAll:
      return staged_all_to_all(slots, first);
    default:
      return staged_barrier(slots, first);
  }
}

}  // namespace
}  // namespace cpu

std::unique_ptr<Engine> make_cpu_engine(int rank, int world_size, const EngineOptions& options) {
  if (world_size < 1 || world_size > cpu::kMaxWorldSize)
    fail(ErrorCode::kInvalid, "cpu engine: expected a world_size of 1 to ", cpu::kMaxWorldSize, ", got ", world_size);
  if (rank < 0 || rank >= world_size)
    fail(ErrorCode::kInvalid, "cpu engine: expected a rank below ", world_size, ", got ", rank);
  const bool fits = options.slot_bytes >= 64u * (world_size + 1) && options.slot_bytes <= 64u << 20;
  if (options.slot_bytes && (options.slot_bytes % 4096 != 0 || !fits))
    fail(ErrorCode::kInvalid,
         "cpu engine: expected slots of a multiple of 4096 bytes, from 64 per rank and 64 more to 64 MiB, got ",
         options.slot_bytes);
  if (options.timeout_ms <= 0)
    fail(ErrorCode::kInvalid, "cpu engine: expected a positive timeout, got ", options.timeout_ms, " ms");
  return std::make_unique<cpu::CpuEngine>(rank, world_size, options);
}

}  // namespace ringcomm
