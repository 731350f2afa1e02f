#include "hierarchy/nccl/library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>

#include "core/error.h"
#include "hierarchy/transport.h"

namespace ringcomm::nccl {

namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kAdvice =
    "; pip install 'ringcomm[nccl]' (nvidia-nccl-cu13), or a torch for CUDA, which brings one, or set RINGCOMM_NCCL to "
    "the path of libnccl.so.2";

std::string dotted(int version) { return concat(version / 10000, '.', version % 10000 / 100, '.', version % 100); }

const char* enumerator(Result result) {
  switch (result) {
    case kSuccess:
      return "ncclSuccess";
    case kUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case kSystemError:
      return "ncclSystemError";
    case kInternalError:
      return "ncclInternalError";
    case kInvalidArgument:
      return "ncclInvalidArgument";
    case kInvalidUsage:
      return "ncclInvalidUsage";
    case kRemoteError:
      return "ncclRemoteError";
    case kInProgress:
      return "ncclInProgress";
  }
  return "a result that this version does not know";
}

void* open(const std::string& path) {
  if (!path.empty()) return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (void* const loaded = dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  return dlopen(kName, RTLD_NOW | RTLD_LOCAL);
}

template <typename Function>
void find(void* handle, const char* symbol, Function& function, const std::string& where) {
  function = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (!function)
    fail(ErrorCode::kUnsupported, "NCCL: expected ", symbol, " in ", where, ", which does not have it", kAdvice);
}

std::string file_of(void* function, const std::string& otherwise) {
  Dl_info info{};
  return dladdr(function, &info) && info.dli_fname ? info.dli_fname : otherwise;
}

std::unique_ptr<Library> read(const std::string& path) {
  const std::string wanted = path.empty() ? kName : path;
  void* const handle = open(path);
  if (!handle) {
    const char* const why = dlerror();
    fail(ErrorCode::kUnsupported, "NCCL: expected ", wanted, ", which does not load (", why ? why : "no reason given",
         ")", kAdvice);
  }
  auto library = std::make_unique<Library>();
  find(handle, "ncclGetVersion", library->get_version, wanted);
  library->where = file_of(reinterpret_cast<void*>(library->get_version), wanted);
  if (library->get_version(&library->version) != kSuccess || library->version < kOldestVersion)
    fail(ErrorCode::kUnsupported, "NCCL: expected version ", dotted(kOldestVersion), " or newer, got ",
         dotted(library->version), " in ", library->where, kAdvice);
#define X(member, symbol, result, parameters) find(handle, symbol, library->member, library->where);
  RINGCOMM_FOR_EACH_NCCL_FUNCTION(X)
#undef X
  return library;
}

}  // namespace

std::string Library::text() const { return dotted(version); }

std::string Library::explain(Result result, Comm comm) const {
  const char* const more = last_error(comm);
  const std::string text = concat(error_string(result), " (", enumerator(result), ")");
  return more && *more ? concat(text, ": ", more) : text;
}

const Library& Library::load(const std::string& path) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::unique_ptr<Library>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Library>& library = (*known)[path];
  if (!library) library = read(path);
  return *library;
}

}  // namespace ringcomm::nccl

namespace ringcomm {

std::string why_no_nccl(const std::string& path) {
  try {
    nccl::Library::load(path);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string nccl_version(const std::string& path) { return nccl::Library::load(path).text(); }

std::string nccl_unique_id(const std::string& path) {
  const nccl::Library& library = nccl::Library::load(path);
  nccl::UniqueId id{};
  if (const nccl::Result result = library.get_unique_id(&id))
    fail(ErrorCode::kSystem, "ncclGetUniqueId: expected success, got ", library.explain(result, nullptr),
         "; see NCCL_SOCKET_IFNAME, and NCCL_DEBUG=INFO for more");
  return std::string(id.bytes, sizeof id.bytes);
}

}  // namespace ringcomm
