// The cuda engine: ranks are processes or threads of one host, several of them may share a GPU, and the bytes go
// through device memory that all of them can access.
#include <algorithm>
#include <atomic>

#include "core/call/check.h"
#include "core/call/parts.h"
#include "core/engine.h"
#include "core/error.h"
#include "core/schedule.h"
#include "cuda/launch/call_checks.h"
#include "cuda/launch/context.h"
#include "cuda/launch/grid.h"
#include "cuda/launch/local_group.h"
#include "cuda/launch/local_ops.h"
#include "cuda/launch/request.h"
#include "cuda/launch/transfer.h"
#include "runtime/forks.h"
#include "runtime/observe/flight_recorder.h"
#include "runtime/observe/trace.h"

namespace ringcomm {

namespace cuda {
namespace {

constexpr auto kLastGrace = std::chrono::seconds(60);  // for kernels to notice an abort

cudaStream_t stream_of(const Call& call) { return reinterpret_cast<cudaStream_t>(call.stream); }

class CudaEngine final : public Engine {
 public:
  CudaEngine(int rank, int world_size, const EngineOptions& options)
      : forks_(forks_so_far()),
        context_(std::make_shared<Context>(rank, world_size, options)),
        watcher_(std::make_shared<Watcher>(options.device, rank)),
        links_(std::make_unique<Links>(*context_)) {}

  ~CudaEngine() override {
    if (forked() || process_is_ending()) {
      leave_behind();
      return;
    }
    if (!context_->closed.load() && in_flight())
      context_->abort(concat("rank ", rank(), " went away with calls in flight"), ErrorCode::kAborted);
    close();
    try {
      const DeviceScope on(context_->device(), rank());
      links_.reset();
      if (scratch_) tolerate(cudaFree(scratch_), "cudaFree of the scratch");
      if (stream_) tolerate(cudaStreamDestroy(stream_), "cudaStreamDestroy");
    } catch (const Error&) {
      // the device is lost, and they with it
    }
    context_->release_peer_memory(idle_);
  }

  const char* kind() const override { return "cuda"; }
  int rank() const override { return context_->rank(); }
  int world_size() const override { return context_->world_size(); }
  int device() const override { return context_->device(); }
  std::string handle() const override { return context_->peer_memory().handle(); }
  void connect(const std::vector<std::string>& handles) override {
    context_->connect(handles, [this] { prepare_device(); });
    local_group_ = context_->shared().local_group(context_->peer_memory());
    local_group_->join(*context_);
    origin_ = {group_number(handles), rank(), world_size(), -1};
  }

  int run(const Call& call) override;
  std::shared_ptr<Request> submit(Call call) override;
  void run_list(const std::vector<Call>& calls) override;
  void pack(const PackCall& packing) override;
  void combine(const CombineCall& combining) override;
  void synchronize(std::uintptr_t stream) override;

  void* allocate(std::size_t nbytes) override;
  void release(void* data) override {
    if (!forked() && data) context_->peer_memory().release(data);
  }
  std::uintptr_t lend_stream() override {
    return forked() ? 0 : reinterpret_cast<std::uintptr_t>(cuda::lend_stream(context_->device(), rank()));
  }
  void take_back_stream(std::uintptr_t stream) override {
    if (!forked()) cuda::take_back_stream(context_->device(), reinterpret_cast<cudaStream_t>(stream));
  }
  void abort(const std::string& reason, ErrorCode code) override {
    if (!forked()) context_->abort(reason, code);
  }
  std::string why_aborted() const override { return context_->shared().abort_state.why(); }
  ErrorCode aborted_as() const override { return context_->shared().abort_state.code(); }
  bool aborted() const override { return context_->ended(); }
  void set_timeout(std::int64_t timeout_ms) override {
    if (timeout_ms <= 0)
      fail(ErrorCode::kInvalid, "timeout: rank ", rank(), " expected more than 0 ms, got ", timeout_ms);
    context_->timeout_ms = timeout_ms;
  }
  std::int64_t timeout() const override { return context_->timeout_ms; }
  void close() override;
  bool closed() const override { return context_->closed.load(); }
  bool runs_this_thread() const override { return watcher_->runs_this_thread(); }
  void count_algorithms(std::shared_ptr<Flag> counts) override { context_->algorithm_counts = std::move(counts); }
  std::vector<std::pair<std::string, std::string>> describe() const override;

 private:
  bool forked() const { return forks_ != forks_so_far(); }
  // CUDA can no longer be called: everything stays as it is.
  void leave_behind() {
    links_.release();
    new std::shared_ptr<Context>(context_);
    new std::shared_ptr<Watcher>(watcher_);
  }

  void check_open(const char* call) const;
  void check(const Call& call) const;

  // Makes a batch of collectives.
  Batch batch_of(const Call* calls, int num_calls) const;
  std::shared_ptr<PendingCall> post(Batch batch);
  void run_batch(const Call* calls, int num_calls);
  std::shared_ptr<PendingCall> post_message(const Call& call, bool own_stream);
  void finish_message(const Call& call, PendingCall& pending);
  void run_messages(const std::vector<const Call*>& calls);
  std::shared_ptr<Request> request(std::shared_ptr<PendingCall> pending, const Call& call) const {
    return std::make_shared<DeviceRequest>(context_, watcher_, std::move(pending), call.op, context_->limit(call));
  }

  void prepare_device();
  std::vector<std::string> gather(const std::string& mine);
  bool in_flight();
  std::vector<StreamEventPtr> last_events() const;
  bool is_idle() const;
  bool await_all(Clock::time_point end);

  const int forks_;
  const std::shared_ptr<Context> context_;
  const std::shared_ptr<Watcher> watcher_;
  std::unique_ptr<Links> links_;
  std::shared_ptr<LocalGroup> local_group_;
  trace::Origin origin_;
  std::mutex mutex_;                          // of what follows
  std::shared_ptr<PendingCall> latest_call_;  // collective
  std::mutex allocation_;                     // one collective allocation at a time
  char* scratch_ = nullptr;                   // of gather(): a handle, and those of all ranks
  cudaStream_t stream_ = nullptr;             // the same
  bool idle_ = false;                         // closed, and no kernel uses its memory any more
};

// ---- checks ---------------------------------------------------------------------------------------------------------

void CudaEngine::check_open(const char* call) const {
  const bool closed = context_->closed.load(std::memory_order_relaxed);
  if (closed || !local_group_ || forked()) report_unusable(call, rank(), closed, forked());
}

void CudaEngine::check(const Call& call) const {
  check_call(call, rank(), world_size());
  check_algorithm(call, rank(), world_size());
  check_parts(call, rank(), world_size());
  check_stream(name(call.op), call.stream, rank());
  check_memory(call, context_->device(), rank());
  if (!context_->ended()) return;
  if (!point_to_point(call.op)) local_group_->check_mismatch(rank());
  context_->check(call.op);
}

// ---- collectives ----------------------------------------------------------------------------------------------------

Batch CudaEngine::batch_of(const Call* calls, int num_calls) const {
  Batch batch;
  batch.calls = calls;
  batch.num_calls = num_calls;
  batch.stream = stream_of(calls[0]);
  batch.capture = capture_of(batch.stream, rank());
  batch.limit_ms = context_->limit(calls[0]);
  return batch;
}

// After a mismatch or a failed launch the ranks cannot continue together.
std::shared_ptr<PendingCall> CudaEngine::post(Batch batch) {
  try {
    PeerMemory& memory = context_->peer_memory();
    if (batch.capture == 0 && memory.has_unused_mappings() && is_idle()) memory.close_unused_mappings();
    auto pending = local_group_->post(*context_, std::move(batch));
    const std::lock_guard<std::mutex> lock(mutex_);
    return latest_call_ = std::move(pending);
  } catch (const Error& error) {
    context_->abort(error.what(), error.code());
    throw;
  }
}

void CudaEngine::run_batch(const Call* calls, int num_calls) {
  const trace::CallSpan span(origin_, -1, calls[0]);  // of the host: a GPU runs the call later
  const Batch batch = batch_of(calls, num_calls);
  const cudaStream_t stream = batch.stream;
  const unsigned long long capture = batch.capture;
  const auto limit = batch.limit_ms;
  const std::shared_ptr<PendingCall> pending = post(batch);
  if (pending->open())
    context_->await(*pending, calls[0].op, Clock::now() + std::chrono::milliseconds(limit), limit);
  else
    context_->rethrow(*pending, calls[0].op);
  StreamEvents::follow_here(stream, capture, pending->end_event(), true, rank());
}

int CudaEngine::run(const Call& call) {
  check_open(name(call.op));
  const DeviceGuard guard(context_->device(), rank());
  check(call);
  if (!point_to_point(call.op)) {
    run_batch(&call, 1);
    return -1;
  }
  const std::shared_ptr<PendingCall> pending = post_message(call, false);
  finish_message(call, *pending);
  return pending->source();
}

std::shared_ptr<Request> CudaEngine::submit(Call call) {
  check_open(name(call.op));
  const trace::CallSpan span(origin_, -1, call);
  const DeviceGuard guard(context_->device(), rank());
  check(call);
  if (point_to_point(call.op)) return request(post_message(call, true), call);
  Batch batch = batch_of(&call, 1);
  batch.kept.push_back(call);
  return request(post(std::move(batch)), call);
}

// ---- sends and receives ---------------------------------------------------------------------------------------------

std::shared_ptr<PendingCall> CudaEngine::post_message(const Call& call, bool own_stream) {
  const cudaStream_t stream = stream_of(call);
  const unsigned long long capture = capture_of(stream, rank());
  if (!links_->leads_to(call.root)) return context_->shared().matcher().post(*context_, call, stream, capture);
  if (!own_stream || call.root == kAnySource) return links_->post({&call}, stream, capture);
  const cudaStream_t link = links_->stream_of(call);
  const StreamEventPtr ready = context_->events().record(stream, capture, rank());
  StreamEvents::follow(link, capture, ready, rank());
  return links_->post({&call}, link, capture);
}

void CudaEngine::finish_message(const Call& call, PendingCall& pending) {
  const std::int64_t limit = context_->limit(call);
  context_->await(pending, call.op, Clock::now() + std::chrono::milliseconds(limit), limit);
  StreamEvents::follow(stream_of(call), capture_of(stream_of(call), rank()), pending.end_event(), rank());
}

// All of them are enqueued before the host or a stream waits for the first.
void CudaEngine::run_messages(const std::vector<const Call*>& calls) {
  std::vector<std::pair<const Call*, std::shared_ptr<PendingCall>>> posted;
  std::vector<const Call*> through_links;
  for (const Call* call : calls) {
    if (links_->leads_to(call->root))
      through_links.push_back(call);
    else
      posted.emplace_back(call, post_message(*call, false));
  }
  for (const std::vector<const Call*>& some : split_into_launches(through_links)) {
    const cudaStream_t stream = stream_of(*some[0]);
    const unsigned long long capture = capture_of(stream, rank());
    for (const Call* call : some)
      if (stream_of(*call) != stream)
        StreamEvents::follow(stream, capture, context_->events().record(stream_of(*call), capture, rank()), rank());
    const std::shared_ptr<PendingCall> pending = links_->post(some, stream, capture);
    for (const Call* call : some) posted.emplace_back(call, pending);
  }
  for (const auto& [call, pending] : posted) finish_message(*call, *pending);
}

// ---- lists ----------------------------------------------------------------------------------------------------------

// Whether one launch may serve both.
bool go_together(const Call& a, const Call& b) {
  const auto plain = [](const Call& c) { return c.input_parts.empty() && c.output_parts.empty(); };
  return reduces(a.op) && a.op == b.op && a.dtype == b.dtype && a.reduce_op == b.reduce_op &&
         a.algorithm == b.algorithm && a.algorithm != Algorithm::kOneshot && a.root == b.root && a.factor == b.factor &&
         a.timeout_ms == b.timeout_ms && a.stream == b.stream && plain(a) && plain(b);
}

void CudaEngine::run_list(const std::vector<Call>& calls) {
  if (calls.empty()) return;
  check_open(name(calls[0].op));
  const DeviceGuard guard(context_->device(), rank());
  for (const Call& call : calls) check(call);
  std::vector<const Call*> messages;
  for (std::size_t at = 0, end; at < calls.size(); at = end) {
    end = at + 1;
    if (point_to_point(calls[at].op)) {
      messages.push_back(&calls[at]);
      continue;
    }
    while (end < calls.size() && end - at < kMaxMessages && go_together(calls[at], calls[end])) ++end;
    run_batch(&calls[at], static_cast<int>(end - at));
  }
  if (!messages.empty()) run_messages(messages);
}

// ---- the rest -------------------------------------------------------------------------------------------------------

void CudaEngine::pack(const PackCall& packing) {
  check_open("pack");
  check_packing(packing, rank());
  check_stream("pack", packing.stream, rank());
  const DeviceGuard guard(context_->device(), rank());
  cuda::pack(packing, *context_);
}

void CudaEngine::combine(const CombineCall& combining) {
  check_open("combine");
  check_combining(combining, rank());
  check_stream("combine", combining.stream, rank());
  const DeviceGuard guard(context_->device(), rank());
  cuda::combine(combining, *context_);
}

void CudaEngine::synchronize(std::uintptr_t stream) {
  check_open("synchronize");
  const DeviceGuard guard(context_->device(), rank());
  for (int idle = 0;; ++idle) {
    context_->check(Op::kBarrier);
    const RelaxedCapture relaxed(rank());
    const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream));
    if (status != cudaErrorNotReady) {
      cuda::check(status, "cudaStreamQuery", rank());
      return context_->check(Op::kBarrier);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(500, 5 * idle)));
  }
}

// Done before any rank runs a kernel: later, creating a stream, allocating memory or loading a kernel may wait for a
// running kernel, which may wait for this rank. So all kernels are loaded, once per process and device.
void CudaEngine::prepare_device() {
  const RelaxedCapture relaxed(rank());
  const int threads = context_->setting().block_threads();
  const auto load = [&](auto kernel) {
    if (kernel) room_for(kernel, threads, context_->device(), rank());
  };
  for (int type = 0; type <= static_cast<int>(DType::kBool); ++type) {
    const DType dtype = static_cast<DType>(type);
    for (int op = 0; op <= static_cast<int>(ReduceOp::kBxor); ++op) {
      const Arithmetic arithmetic = arithmetic_of(dtype, static_cast<ReduceOp>(op));
      for (const auto kernel_of : {ring_kernel, direct_kernel, oneshot_kernel})
        load(kernel_of(arithmetic.dtype, arithmetic.op));
      load(known_kernel(arithmetic.dtype, arithmetic.op));
    }
    for (int to = 0; to <= static_cast<int>(DType::kBool); ++to) load(pack_kernel(dtype, static_cast<DType>(to)));
  }
  load(copy_kernel());
  load(ring_copy_kernel());
  if (const int here = context_->setting().ranks_of_a_device; needs_many_exchanges(here, world_size())) {
    int driver = 0;
    cuda::check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion", rank());
    if (driver < 12010)
      fail(ErrorCode::kUnsupported, "connect: rank ", rank(), " expected a driver for CUDA 12.1 or newer, which ", here,
           " ranks on one GPU need in a communicator of ", world_size(), ", got one for CUDA ", driver / 1000, '.',
           driver % 1000 / 10, "; update it, or start fewer ranks on a GPU");
    load(many_exchange_kernel());
  } else {
    load(exchange_kernel());
  }
  if (context_->peer_memory().one_process()) return;
  load(transfer_kernel());
  links_->connect();
  cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate", rank());
  cuda::check(cudaMalloc(&scratch_, kArenaHandleBytes * (1 + world_size())), "cudaMalloc of the scratch", rank());
}

// Gathers kArenaHandleBytes of every rank: a collective of the communicator, in the order of its calls.
std::vector<std::string> CudaEngine::gather(const std::string& mine) {
  const std::size_t all = kArenaHandleBytes * world_size();
  {
    const RelaxedCapture relaxed(rank());
    cuda::check(cudaMemcpyAsync(scratch_, mine.data(), kArenaHandleBytes, cudaMemcpyHostToDevice, stream_),
                "cudaMemcpyAsync of an arena's handle", rank());
  }
  Call call;
  call.op = Op::kAllGather;
  call.input = scratch_;
  call.output = scratch_ + kArenaHandleBytes;
  call.count = kArenaHandleBytes;
  call.stream = reinterpret_cast<std::uintptr_t>(stream_);
  submit(call)->wait();
  std::string text(all, '\0');
  const RelaxedCapture relaxed(rank());
  cuda::check(cudaMemcpyAsync(text.data(), call.output, all, cudaMemcpyDeviceToHost, stream_),
              "cudaMemcpyAsync of the arenas' handles", rank());
  cuda::check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", rank());
  std::vector<std::string> handles;
  for (int p = 0; p < world_size(); ++p) handles.push_back(text.substr(p * kArenaHandleBytes, kArenaHandleBytes));
  return handles;
}

// Ranks release in different orders: one may have room where another has none, so they grow together.
void* CudaEngine::allocate(std::size_t nbytes) {
  check_open("empty");
  const std::lock_guard<std::mutex> lock(allocation_);
  const DeviceGuard guard(context_->device(), rank());
  PeerMemory& memory = context_->peer_memory();
  nbytes = larger(nbytes, 1);
  void* data = memory.allocate(nbytes);
  if (memory.one_process()) {
    if (!data) memory.grow(nbytes);
    return data ? data : memory.allocate(nbytes);
  }
  try {
    std::string need(kArenaHandleBytes, '\0');
    need[0] = data ? 0 : 1;
    const std::vector<std::string> needs = gather(need);
    if (std::any_of(needs.begin(), needs.end(), [](const std::string& n) { return n[0] != 0; }))
      memory.add_arenas(gather(memory.create_arena(nbytes)));
  } catch (...) {
    if (data) memory.release(data);
    throw;
  }
  return data ? data : memory.allocate(nbytes);
}

std::vector<StreamEventPtr> CudaEngine::last_events() const {
  std::vector<StreamEventPtr> ends = links_->last();
  if (local_group_) ends.push_back(local_group_->last());
  ends.erase(std::remove(ends.begin(), ends.end(), nullptr), ends.end());
  return ends;
}

bool CudaEngine::in_flight() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if ((latest_call_ && latest_call_->open()) || context_->shared().matcher().has_open(rank())) return true;
  try {
    const DeviceGuard guard(context_->device(), rank());
    return !is_idle();
  } catch (const Error&) {
    return true;
  }
}

// Whether no kernel of this rank runs.
bool CudaEngine::is_idle() const {
  for (const StreamEventPtr& event : last_events())
    if (!reached(*event, rank())) return false;
  return true;
}

bool CudaEngine::await_all(Clock::time_point end) {
  for (const StreamEventPtr& event : last_events())
    if (!poll_until(end, [&] { return reached(*event, rank()); })) return false;
  return true;
}

void CudaEngine::close() {
  if (forked() || process_is_ending() || context_->closed.exchange(true)) return;
  const auto limit = std::chrono::milliseconds(context_->timeout_ms.load());
  try {
    const DeviceGuard guard(context_->device(), rank());
    auto open = context_->shared().matcher().close(rank());
    if (latest_call_) open.push_back(latest_call_);
    for (const auto& pending : open) try {
        context_->await(*pending, Op::kBarrier, Clock::now() + limit, limit.count());
      } catch (const Error&) {
        // the call's owner gets the error from its request
      }
    bool idle = await_all(Clock::now() + 2 * limit + kGrace);
    if (!idle) {
      context_->abort(concat("rank ", rank(), " closed the communicator and its last calls did not end"),
                      ErrorCode::kAborted);
      idle = await_all(Clock::now() + kLastGrace);
    }
    idle_ = idle && !context_->captured.load();  // a graph keeps using the memory's addresses
    context_->check(Op::kBarrier);               // while the host page is there
  } catch (const Error&) {
    // the communicator has ended: later calls say why
  }
  watcher_->stop();
  context_->waits().stop();
  if (local_group_) local_group_->leave(rank());
}

std::vector<std::pair<std::string, std::string>> CudaEngine::describe() const {
  const PeerMemory& memory = context_->peer_memory();
  const Layout& layout = memory.layout();
  const bool connected = local_group_ != nullptr;
  std::string order, reach;
  for (int i = 0; connected && i < world_size(); ++i) {
    order += concat(i ? " " : "", static_cast<int>(memory.ring_order()[i]));
    reach += concat(i ? " " : "", memory.reach(i));
  }
  const std::size_t here = connected ? memory.local_ranks().size() : 1;
  return {{"engine", "cuda"},
          {"device", concat(context_->device(), ": ", memory.facts().text())},
          {"ranks", !connected || memory.one_process() ? "threads" : "processes"},
          {"sharing", here == 1 ? std::string("one rank on this device") : concat(here, " ranks on one device")},
          {"channels", std::to_string(layout.channels)},
          {"slot_bytes", std::to_string(layout.slot_bytes)},
          {"segment_bytes", std::to_string(layout.segment_bytes())},
          {"links", reach},
          {"visible_buffers", std::to_string(memory.num_visible_buffers())},
          {"copy_engine",
           concat(context_->copy_calls.load(), " calls, ", context_->refused_copy_calls.load(), " of them by direct")},
          {"worst_link", connected ? name(memory.worst_path()) : ""},
          {"processes_on_device", std::to_string(connected ? memory.processes_on_device() : 1)},
          {"mps", memory.facts().mps ? "yes" : "no"},
          {"ring_order", order},
          {"order", "canonical"},
          {"tuning", context_->tuning().source()}};
}

}  // namespace
}  // namespace cuda

std::unique_ptr<Engine> make_cuda_engine(int rank, int world_size, const EngineOptions& options) {
  if (world_size < 1) fail(ErrorCode::kInvalid, "cuda engine: expected a world_size of 1 or more, got ", world_size);
  if (world_size > cuda::kMaxRanks)
    fail(ErrorCode::kUnsupported, "cuda engine: expected at most ", cuda::kMaxRanks, " ranks of one host, got ",
         world_size, "; use smaller groups, or NCCL between them");
  if (rank < 0 || rank >= world_size)
    fail(ErrorCode::kInvalid, "cuda engine: expected a rank below ", world_size, ", got ", rank);
  if (options.timeout_ms <= 0)
    fail(ErrorCode::kInvalid, "cuda engine: expected a positive timeout, got ", options.timeout_ms, " ms");
  if (const std::string why = why_no_cuda(); !why.empty())
    fail(ErrorCode::kUnsupported, "cuda engine: rank ", rank, " expected a usable GPU, got ", why);
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount", rank);
  if (options.device < 0 || options.device >= devices)
    fail(ErrorCode::kInvalid, "cuda engine: rank ", rank, " expected a device below ", devices, ", got ",
         options.device, "; see CUDA_VISIBLE_DEVICES");
  return std::make_unique<cuda::CudaEngine>(rank, world_size, options);
}

}  // namespace ringcomm
