// CUDA for a build of torch that has none: one device, which computes nothing. Device guards,
// autograd's threads and `torch.cuda` ask it whether there is a GPU. It must be loaded before torch.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace accelerator
}  // namespace at

// The conditions of sdp_utils.cpp on sm80 or later (cuDNN's kernel is off). Where only the slow
// kernel could attend, whose memory grows with the square of the length, it is an error.
int64_t kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double, bool causal, std::optional<double>,
               bool grouped) {
  auto type = query.scalar_type();
  TORCH_CHECK(key.scalar_type() == type && value.scalar_type() == type, "query is of another type");
  TORCH_CHECK(!mask || mask->scalar_type() == type || mask->scalar_type() == at::kBool,
              "invalid dtype for bias - should match query's dtype");
  bool half = type == at::kHalf || type == at::kBFloat16;
  if (half && !mask && (!causal || query.size(2) == key.size(2))) {
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  }
  TORCH_CHECK(!grouped && query.size(1) == key.size(1), "only the slow kernel can do this");
  return static_cast<int64_t>(at::SDPBackend::efficient_attention);
}
const bool chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(kernel), true);
