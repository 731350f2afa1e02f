// Segments, arenas and handles of the CUDA engine on the emulated runtime, where the ranks are threads of one process:
//   cuda_segments_test
#include <sys/wait.h>

#include <algorithm>

#include "cpp/cuda/groups.h"

namespace ringcomm::test {
namespace {

CUcontext current_context() {
  CUcontext context = nullptr;
  require(cuCtxGetCurrent(&context) == cudaSuccess, "the current context");
  return context;
}

// A context takes 500 MB of a real GPU: work on one device must not make one on the thread's usual device.
void test_guards_make_no_context() {
  int now = 0;
  {
    const cuda::DeviceGuard guard(1, 0);
    require(cudaGetDevice(&now) == cudaSuccess && now == 1, "the device of the guard");
  }
  require(emulator::has_context(1) && !emulator::has_context(0), "a context on device 0");
  require(!current_context() && cudaGetDevice(&now) == cudaSuccess && now == 0, "no context, as before");
  require(cudaSetDevice(0) == cudaSuccess, "choosing device 0");
  {
    const cuda::DeviceGuard guard(1, 0);
    const cuda::DeviceGuard again(1, 0);
  }
  require(cudaGetDevice(&now) == cudaSuccess && now == 0, "the device of before");
}

// CuPy, a green context or the driver's API: what a program has made current is current after a guard.
void test_guards_keep_the_context_of_the_program() {
  const CUcontext usual = current_context();
  void* memory = nullptr;
  for (int device : {0, 1}) {
    CUctx_st own{device, false};
    require(cuCtxSetCurrent(&own) == cudaSuccess && cudaMalloc(&memory, 8) != cudaSuccess, "a context of one's own");
    cudaGetLastError();
    for (int i = 0; i < 2; ++i) {
      const cuda::DeviceGuard guard(1, 0);
      require(current_context() != &own, "the primary context, on the program's device too");
      require(cudaMalloc(&memory, 8) == cudaSuccess && cudaFree(memory) == cudaSuccess, "memory under a guard");
    }
    require(current_context() == &own, "the program's context");
    require_error(outcome([] { const cuda::DeviceGuard guard(2, 0); }), ErrorCode::kSystem, {"rank 0", "cuDeviceGet"});
    require(current_context() == &own, "the program's context after an error");
    Groups groups = make(2);
    connect(groups);
    groups.clear();
    require(current_context() == &own, "the program's context after the life of a group");
  }
  require(cuCtxSetCurrent(usual) == cudaSuccess, "the context of before");
}

void test_control_socket() {
  cuda::ControlSocket a, b;
  const auto subject = cuda::random_identity(), other = cuda::random_identity();
  require(cuda::identity_of(cuda::text_of(subject)) == subject, "an identity as text");
  const int before = open_files();
  cuda::ControlMessage message, got;
  message.kind = cuda::ControlMessage::kMemory;
  message.from = 3;
  message.subject = subject;
  message.text = std::string(1000, 'x');
  message.fd = STDERR_FILENO;
  require(b.send({a.address().name, other}, message) == cuda::ControlSocket::SendResult::kSent,
          "a message of a stranger");
  require(b.send(a.address(), message) == cuda::ControlSocket::SendResult::kSent, "a message");
  while (a.receive(0)) continue;
  require(open_files() == before + 1, "a stranger's file is closed");
  require(!a.take(cuda::ControlMessage::kMemory, 3, &other, got) &&
              !a.take(cuda::ControlMessage::kMemory, 2, &subject, got) &&
              !a.take(cuda::ControlMessage::kClosed, 3, &subject, got),
          "messages are told apart by subject, sender and kind");
  require(a.take(cuda::ControlMessage::kMemory, 3, &subject, got) && got.text == std::string(467, 'x'),
          "a message, cut to its length");
  require(!a.take(cuda::ControlMessage::kMemory, 3, &subject, got), "a stranger's message is thrown away");
  ::close(got.fd);
  message.fd = -1;
  int sent = 0;
  while (sent < 100000 && b.send(a.address(), message) == cuda::ControlSocket::SendResult::kSent) ++sent;
  require(sent < 100000 && b.send(a.address(), message) == cuda::ControlSocket::SendResult::kFull, "a full socket");
  const auto nobody = std::make_unique<cuda::ControlSocket>()->address();
  require(b.send(nobody, message) == cuda::ControlSocket::SendResult::kUnreachable, "nobody");
}

void test_one_device() {
  for (int w : {1, 2, 3, 8}) {
    Groups groups = make(w);
    const Layout& layout = groups[0]->layout();
    for (const auto& group : groups)
      for (std::uint64_t i = layout.channel_at(0); i < layout.segment_bytes(); ++i)
        require(group->segment(group->rank())[i] == 0, "a new segment is zero");
    connect(groups);
    for (int r = 0; r < w; ++r) {
      PeerMemory& group = *groups[r];
      require(group.one_process() && group.one_device(), "one device");
      require(static_cast<int>(group.local_ranks().size()) == w, "the local ranks are all ranks");
      require(group.identity() == groups[0]->identity() && group.identity().size() == 32, "one identity");
      for (int p = 0; p < w; ++p) {
        require(group.segment(p) == groups[p]->segment(p), "peers of a process by plain pointer");
        require(group.local_ranks()[p] == p && group.ring_order()[p] == p, "ranks in order");
        require(group.reach(p) == (p == r ? "itself" : "pointer"), "reach");
      }
      const int local = 0;
      const Location at = locate(group, &local, 4);
      require(at.visible && at.arena < 0 && at.where == reinterpret_cast<std::uint64_t>(&local), "all is visible");
    }
    if (w > 1) {
      groups[1]->stop();
      for (const auto& group : groups) {
        require(load_acquire(&group->page()->abort.value) == 1, "stop sets every host page of the process");
        for (int i = 0; i < 5000 && load_acquire(reinterpret_cast<Flag*>(group->segment(group->rank()))) == 0; ++i)
          usleep(1000);
        require(load_acquire(reinterpret_cast<Flag*>(group->segment(group->rank()))) == 1, "stop sets abort flags");
      }
    }
  }
}

void test_two_devices() {
  Groups groups = make(4, [](int r) { return r % 2; });
  const int files = open_files(), offered = std::getenv("RINGCOMM_CUDA_HANDLES") ? 4 : 0;
  connect(groups);
  require(open_files() == files - offered, "what was offered as a file is closed once everybody has it");
  for (const auto& group : groups) {
    require(group->one_process() && !group->one_device(), "one process, two devices");
    require(group->local_ranks() == std::vector<int>({group->device(), group->device() + 2}), "local ranks by device");
    const int expected[] = {0, 1, 3, 2};
    require(std::equal(expected, expected + 4, group->ring_order()), "ranks of a device side by side");
    const int local = 0;
    require(!locate(*group, &local, 4).visible, "private memory is not visible to another device");
    require(group->allocate(1) == nullptr, "no arena yet");
    const int before = open_files();
    group->grow(1000);
    require(open_files() == before + 1, "an emulated allocation is one file, and no handle stays open");
    void* const a = group->allocate(1000);
    void* const b = group->allocate(2000);
    require(a && b && a != b, "two pieces");
    const Location at = locate(*group, static_cast<char*>(b) + 8, 1992);
    require(at.visible && at.arena == -1 && at.where == reinterpret_cast<std::uint64_t>(b) + 8, "an arena's address");
    require_error(outcome([&] { group->release(static_cast<char*>(a) + 1); }), ErrorCode::kInvalid, {"release"});
    group->release(a);
    require_error(outcome([&] { group->release(a); }), ErrorCode::kInvalid, {"release", "once"});
    require(group->allocate(900) == a, "first fit");
    group->release(a);
    group->release(b);
    const std::size_t size = 32u << 20;
    void* const all = group->allocate(size);
    require(locate(*group, all, size).visible && !locate(*group, all, size + 1).visible, "not beyond the arena");
    require(all == a, "pieces grow together again");
    require(!group->allocate(1), "full");
    group->release(all);
  }
}

void test_close_orders() {
  std::vector<int> order{0, 1, 2};
  const int before = open_files();
  do {
    Groups groups = make(3, [](int r) { return r % 2; });
    connect(groups);
    for (const int r : order) {
      groups[r].reset();
      for (const auto& group : groups)
        if (group) group->segment(r)[group->layout().channel_at(1)] = 1;  // as a late kernel may
    }
  } while (std::next_permutation(order.begin(), order.end()));
  require(open_files() == before, "no file stays open");
  require(cuda::deferred_frees::count() == 0, "memory of one process is freed at once");
}

// A child of a fork leaves everything as it is.
void test_fork() {
  if (!kProcesses) return;
  Groups groups = make(2);
  connect(groups);
  groups[0]->segment(0)[groups[0]->layout().channel_at(0)] = 42;
  const pid_t child = fork();
  if (child == 0) {
    groups.clear();
    _exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && status == 0, "a forked child destroys its copy");
  require(groups[1]->segment(0)[groups[0]->layout().channel_at(0)] == 42, "memory after a fork");
}

void test_bad_handles() {
  const auto with = [](const std::function<void(std::vector<std::string>&)>& change) {
    Groups groups = make(2);
    auto handles = handles_of(groups);
    change(handles);
    return connect(groups, handles);
  };
  const auto edit = [](std::string& text, const std::function<void(RankHandle&)>& change) {
    RankHandle handle = RankHandle::unpack(text, 0);
    change(handle);
    text = handle.pack();
  };
  for (const auto& got : with([](auto& h) { std::swap(h[0], h[1]); }))
    require_error(got, ErrorCode::kInvalid, {"its own handle"});
  for (const auto& got : with([](auto& h) { h.pop_back(); }))
    require_error(got, ErrorCode::kInvalid, {"2 handles", "got 1"});
  for (const auto& got : with([](auto& h) { h[1] = "ringcomm-cpu-2 x"; }))
    require_error(got, ErrorCode::kInvalid, {"cuda engine", "ringcomm-cpu-2"});
  auto got = with([&](auto& h) { edit(h[1], [](RankHandle& x) { x.machine = "elsewhere/a/b"; }); });
  require_error(got[0], ErrorCode::kUnsupported, {"elsewhere", "one host"});
  got = with([&](auto& h) { edit(h[1], [](RankHandle& x) { x.layout.channels = 3; }); });
  require_error(got[0], ErrorCode::kMismatch, {"channels=2", "channels=3", "same options"});
  got = with([&](auto& h) { edit(h[1], [](RankHandle& x) { x.rank = 0; }); });
  require_error(got[0], ErrorCode::kInvalid, {"expected the handle of rank 1", "got rank 0"});

  Groups groups;
  for (int r = 0; r < 2; ++r) groups.push_back(std::make_unique<PeerMemory>(r, 0, small_layout(2, 1 + r), kLimitMs));
  for (const auto& text : connect(groups, handles_of(groups)))
    require_error(text, ErrorCode::kMismatch, {"channels=1", "channels=2"});
  require_error(outcome([&] { groups[0]->connect(handles_of(groups)); }), ErrorCode::kInvalid, {"new engine"});
}

void test_options() {
  EngineOptions options;
  Layout layout = cuda::default_layout(3, options);
  require(layout.channels == 24 && layout.slot_bytes == 256 * 1024 && layout.packet_bytes == 11520, "defaults");
  require(layout.stage_bytes >= 512 * 1024 && layout.stage_bytes % (3 * kLineBytes) == 0, "stage rounded up");
  options.channels = 5;
  options.slot_bytes = 1000;
  layout = cuda::default_layout(2, options);
  require(layout.channels == 5 && layout.slot_bytes == 1024, "options");
  setenv("RINGCOMM_CUDA_LAYOUT", "channels=2,packet_bytes=1,depth=7", 1);
  layout = cuda::default_layout(2, options);
  require(layout.channels == 2 && layout.packet_bytes == 1920 && layout.depth == 7, "environment");
  for (const char* bad : {"chanels=2", "channels", "channels=", "channels=-1", "channels=x", "depth=99999999999999"}) {
    setenv("RINGCOMM_CUDA_LAYOUT", bad, 1);
    require_error(outcome([&] { cuda::default_layout(2, options); }), ErrorCode::kInvalid,
                  {"RINGCOMM_CUDA_LAYOUT", bad});
  }
  unsetenv("RINGCOMM_CUDA_LAYOUT");
  const auto creating = [](int rank, int device, const Layout& l) {
    return outcome([&] { PeerMemory group(rank, device, l, kLimitMs); });
  };
  require_error(creating(0, 0, small_layout(33)), ErrorCode::kUnsupported, {"at most 32 ranks", "got 33"});
  require_error(creating(2, 0, small_layout(2)), ErrorCode::kInvalid, {"rank 2 of 2"});
  require_error(creating(0, 7, small_layout(2)), ErrorCode::kInvalid, {"device index below 2", "got 7"});
  require_error(creating(0, 0, small_layout(2, 65)), ErrorCode::kInvalid, {"64", "channels=65"});
  setenv("RINGCOMM_CUDA_HANDLES", "tcp", 1);
  require_error(creating(0, 0, small_layout(2)), ErrorCode::kInvalid, {"RINGCOMM_CUDA_HANDLES", "tcp"});
  unsetenv("RINGCOMM_CUDA_HANDLES");
}

void test_broken_path() {
  Groups groups = make(3, [](int r) { return r % 2; });
  groups[0]->segment(0)[groups[0]->layout().probe_at(0) + 77] ^= 1;
  const auto got = connect(groups, handles_of(groups));
  // Ranks 1 and 2 see it; whoever is told first by the other says so.
  for (const auto& text : got) require_error(text, ErrorCode::kSystem, {"rank 0", "got other data", "share memory"});
  require(got[0].find("this from rank") != std::string::npos, "rank 0 is told: " + got[0]);
  require(got[1].find("PCIe peer path is broken") != std::string::npos ||
              got[2].find("PCIe peer path is broken") != std::string::npos ||
              got[2].find("sharing of device memory") != std::string::npos,
          "what to do: " + got[1]);
}

void test_lonely() {
  Groups groups;
  for (int r = 0; r < 2; ++r)
    groups.push_back(std::make_unique<PeerMemory>(r, 0, small_layout(2), r == 0 ? 300 : kLimitMs));
  require_error(outcome([&] { groups[0]->connect(handles_of(groups)); }), ErrorCode::kTimeout,
                {"rank 1", "within 0.3 s"});
  require_error(outcome([&] { groups[1]->connect(handles_of(groups)); }), ErrorCode::kTimeout, {"rank 0", "rank 1"});

  groups = make(2);
  const auto handles = handles_of(groups);
  std::thread stopper([&] {
    usleep(100000);
    groups[0]->stop();
  });
  require_error(outcome([&] { groups[0]->connect(handles); }), ErrorCode::kAborted, {"abort"});
  stopper.join();

  groups = make(2);
  const auto others = handles_of(groups);
  groups[1].reset();
  require_error(outcome([&] { groups[0]->connect(others); }), ErrorCode::kAborted, {"closed already"});
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  setenv("RINGCOMM_EMULATED_DEVICES", "2", 1);
  require(ringcomm::why_no_cuda().empty(), ringcomm::why_no_cuda());
  test_guards_make_no_context();
  test_guards_keep_the_context_of_the_program();
  test_options();
  test_control_socket();
  test_one_device();
  test_two_devices();
  test_close_orders();
  setenv("RINGCOMM_CUDA_HANDLES", "vmm", 1);
  test_two_devices();
  test_close_orders();
  unsetenv("RINGCOMM_CUDA_HANDLES");
  test_fork();
  test_bad_handles();
  test_broken_path();
  test_lonely();
  std::printf("ok: %ld checks\n", cells.load());
}
