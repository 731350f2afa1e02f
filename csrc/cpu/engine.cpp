// The cpu engine: ranks are processes or threads of one host and exchange bytes through shared memory.
#include <atomic>
#include <limits>

#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/engine.h"
#include "core/error.h"
#include "cpu/collectives/p2p.h"
#include "cpu/collectives/runner.h"
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

// The watch of a thread that waits for a call of its own rank, while another thread executes the call and waits for the
// peer.
Watch watch_item(const Group& group) {
  const auto wait = std::make_shared<LongWait>(group, WaitKind::kItem, group.rank(),
                                               std::numeric_limits<std::int64_t>::max(), nullptr);
  return [wait](const std::function<bool()>& has_come) { wait->check(has_come); };
}

class CpuEngine final : public Engine {
 public:
  CpuEngine(int rank, int world_size, const EngineOptions& options)
      : forks_(forks_so_far()),
        group_(rank, world_size, options),
        heap_(group_),
        collectives_(group_, heap_),
        p2p_(std::make_unique<PointToPoint>(group_)),
        queue_(std::make_unique<WorkQueue>([this](const Call& call) { collectives_.run(call); },
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
  void connect(const std::vector<std::string>& handles) override { group_.connect(handles, group_.timeout_ms); }

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
  void count_algorithms(std::shared_ptr<Flag> counts) override { collectives_.count_algorithms(std::move(counts)); }
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

  const int forks_;
  Group group_;
  Heap heap_;
  Collectives collectives_;
  std::unique_ptr<PointToPoint> p2p_;
  std::unique_ptr<WorkQueue> queue_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> absorbed_{false};
};

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
