class MindSpeedFeature:  # the same path in mindspeed
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name, self.optimization_level = feature_name.replace("-", "_"), optimization_level
