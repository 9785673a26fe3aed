// A device of type "npu" whose memory is host memory, and an "hccl" backend on top of gloo.
//
// What PyTorch asks of a device in PrivateUse1: memory, a device guard, hooks, a few operators. All other operators run
// on the host, on copies. Tensors of it are no CPU tensors: mixing the two fails as it does on a real device.

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>

namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;
bool pins = true;
std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, c10::Device(kNpu, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(kNpu, &device_memory);

struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    if (pins) pinned.insert(data);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNpu; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old(kNpu, current);
    current = device.index();
    return old;
  }
  c10::Device getDevice() const override { return {kNpu, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // Work is done when the call returns, so that events have nothing to wait for.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// The same memory as a host tensor, which keeps the device's tensor alive.
at::Tensor host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, options);
}
std::vector<at::Tensor> host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> found;
  for (const auto& tensor : tensors) found.push_back(host(tensor));
  return found;
}
std::vector<std::vector<at::Tensor>> host(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<std::vector<at::Tensor>> found;
  for (const auto& list : lists) found.push_back(host(list));
  return found;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kNpu, current));
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(kNpu, current));
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  host(dst).copy_(host(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  host(dst).copy_(host(self));
  return dst;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}
at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {1});
}
// As torch_npu has it: without this, a parameter's data cannot move from the host to the device in place.
bool compatible(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& t) { return t.is_cpu() || t.device().type() == kNpu; };
  return self.key_set() == from.key_set() || (dense(self) && dense(from));
}
at::Scalar local_scalar_dense(const at::Tensor& self) { return at::native::_local_scalar_dense_cpu(host(self)); }
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", compatible);
}

// Collectives: what torch_npu refuses for HCCL is refused, the rest is done by gloo on the same memory.
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
struct Hccl final : c10d::Backend {
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }

  static at::Tensor on_device(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == kNpu, "HCCL: a tensor on ", t.device());
    return host(t);
  }
  static void check(const at::Tensor& t, const c10d::ReduceOp& op, const char* what) {
    static const std::unordered_set<at::ScalarType> reduces = {at::kChar, at::kShort, at::kInt,     at::kLong,
                                                               at::kHalf, at::kFloat, at::kBFloat16};
    TORCH_CHECK(reduces.count(t.scalar_type()), "HCCL ", what, ": Unsupported data type ", t.scalar_type());
    TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "Unhandled ReduceOp");
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    auto h = host(t);
    return gloo_->broadcast(h, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    check(t[0], o.reduceOp, "allreduce");
    Tensors h = {on_device(t[0])};
    return gloo_->allreduce(h, o);
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto h_out = host(out);
    auto h_in = host(in);
    return gloo_->allgather(h_out, h_in, o);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto h_out = on_device(out), h_in = on_device(in);
    return gloo_->_allgather_base(h_out, h_in, o);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    check(in, o.reduceOp, "_reduce_scatter_base");
    auto h_out = on_device(out), h_in = on_device(in);
    return gloo_->_reduce_scatter_base(h_out, h_in, o);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto h_out = host(out), h_in = host(in);
    return gloo_->allgather_into_tensor_coalesced(h_out, h_in, o);
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo_->barrier(o); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int device) { current = static_cast<c10::DeviceIndex>(device); });
  m.def("set_pins", [](bool value) { pins = value; });
  py::module::import("torch.distributed");
  py::class_<Hccl, c10d::Backend, c10::intrusive_ptr<Hccl>>(m, "Hccl").def(
      py::init<c10::intrusive_ptr<c10d::Backend>>());
}
