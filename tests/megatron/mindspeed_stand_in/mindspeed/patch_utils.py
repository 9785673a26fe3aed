import importlib
import sys


class Patch:
    def __init__(self, name):  # mindspeed/patch_utils.py: Patch.__init__
        self.orig_module_name, self.orig_func_name = name.rsplit(".", 1)
        self.orig_module = self.orig_func = self.patch_func = self.final_patch_func = None
        self.wrappers, self.is_applied = [], False

    def apply_patch(self):  # mindspeed/patch_utils.py: Patch.apply_patch
        home, _, kind = self.orig_module_name.rpartition(".")
        owner = vars(importlib.import_module(home)).get(kind) or importlib.import_module(self.orig_module_name)
        current, final = getattr(owner, self.orig_func_name), self.patch_func
        if self.orig_module is None:
            self.orig_module, self.orig_func = owner, current
        for wrapper in (lambda fn: fn, *self.wrappers):
            final = wrapper(final or self.orig_func)
        self.bind(current, final)
        self.is_applied, self.final_patch_func = True, final

    def bind(self, old, new, but="/"):
        for place in (self.orig_module, *(m for name, m in list(sys.modules.items()) if but not in name)):
            if getattr(place, self.orig_func_name, None) is old:
                setattr(place, self.orig_func_name, new)

    def remove_patch(self):  # mindspeed/patch_utils.py: Patch.remove_patch
        self.bind(self.final_patch_func, self.orig_func, but="mindspeed")
        self.patch_func, self.final_patch_func, self.wrappers, self.is_applied = None, None, [], False


class MindSpeedPatchesManager:
    patches_info = {}

    @staticmethod
    def register_patch(name, new):  # mindspeed/patch_utils.py: Patch.set_patch_func
        patch = MindSpeedPatchesManager.patches_info.setdefault(name, Patch(name))
        patch.is_applied = patch.wrappers.append(new) if new.__name__.endswith("wrapper") else False
        patch.patch_func = patch.patch_func if new in patch.wrappers else new

    @staticmethod
    def apply_patches():  # mindspeed/patch_utils.py: MindSpeedPatchesManager.apply_patches
        [patch.apply_patch() for patch in MindSpeedPatchesManager.patches_info.values() if not patch.is_applied]

    @staticmethod
    def remove_patches():  # mindspeed/patch_utils.py: MindSpeedPatchesManager.remove_patches
        [patch.remove_patch() for patch in MindSpeedPatchesManager.patches_info.values()]
